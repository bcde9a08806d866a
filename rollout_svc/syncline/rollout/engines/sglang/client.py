"""The server's HTTP interface, as far as the engine needs it. Facts are of SGLang 0.5.23, observed.

Dangers that callers must keep away from it: a token id outside the vocabulary and a truncated checkpoint end the
server's process, and a tensor with an unknown name is skipped with success.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import httpx

_WAIT = httpx.Timeout(30.0, read=600.0)


class ServerGone(ConnectionError):
    """No answer: the server is not there, or went away meanwhile."""


class Refused(ValueError):
    """The server answered that it will not. The message is its own."""


class Server:
    """A server at `url`. Safe for threads.

    url   such as http://127.0.0.1:30000
    key   admin key, if the server has one
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=self.headers, timeout=_WAIT, trust_env=False)

    def close(self) -> None:
        self._http.close()

    # ---- what it is
    def ready(self) -> bool:
        """Whether it answers a request of its own."""
        try:
            return self._http.get("/health_generate", timeout=20.0).status_code == 200
        except httpx.HTTPError:
            return False

    def info(self) -> dict[str, Any]:
        """`model_path`, `weight_version`, ..."""
        return self._call("GET", "/model_info", None)

    def release(self) -> str:
        """The server's SGLang release, such as "0.5.23"."""
        return str(self._call("GET", "/server_info", None).get("version", ""))

    def has_sessions(self) -> bool:
        """Whether weights are updated in sessions. Opens one and closes it again where there are."""
        answer = self._send("POST", "/begin_weight_update", {"selector": "all"})
        if answer.status_code in (404, 405):
            return False
        self._call("POST", "/end_weight_update", {})
        return True

    # ---- tokens
    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call("POST", "/generate", body)

    def abort(self, rid: str) -> None:
        """End a request: its reply comes, with what was sampled. The server takes `rid` for a prefix."""
        self._send("POST", "/abort_request", {"rid": rid})

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop the scheduler. abort: end all; retract: give up contexts, keep tokens; in_place: freeze."""
        self._call("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        self._call("POST", "/continue_generation", {})

    # ---- weights
    def load_disk(self, path: str, label: str, *, flush: bool = True) -> None:
        """Load the checkpoint at `path`. Waits for what runs, unless the scheduler is paused."""
        body = {
            "model_path": path,
            "load_format": "auto",  # else that of the start, which may have been "dummy"
            "weight_version": label,
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        self._call("POST", "/update_weights_from_disk", body)

    def begin_update(self) -> None:
        self._call("POST", "/begin_weight_update", {"selector": "all"})

    def end_update(self) -> None:
        self._call("POST", "/end_weight_update", {})

    def load_bucket(self, bucket: str, label: str, *, flush: bool, ranks: int = 1) -> None:
        """Load the tensors of one bucket (`buckets.encoded`), inside a session. Each rank gets all of it."""
        body = {
            "serialized_named_tensors": [bucket] * ranks,
            "load_format": "flattened_bucket",
            "weight_version": label,
            "flush_cache": flush,
        }
        self._call("POST", "/update_weights_from_tensor", body)

    def init_group(self, name: str, meeting: Mapping[str, Any]) -> None:
        """Meet in a `torch.distributed` group. Comes back once all of it are there."""
        self._call("POST", "/init_weights_update_group", {**meeting, "group_name": name, "backend": "gloo"})

    def load_broadcast(self, name: str, bucket: Mapping[str, Any]) -> None:
        """Load what rank 0 of group `name` broadcasts, inside a session."""
        self._call("POST", "/update_weights_from_distributed", {**bucket, "group_name": name})

    def destroy_group(self, name: str) -> None:
        self._call("POST", "/destroy_weights_update_group", {"group_name": name})

    def checksums(self, ranks: int = 1) -> dict[str, str]:
        """Parameter -> checksum, as each of the server's ranks holds it; `ranked` names the parameters of several."""
        answer = self._call("POST", "/weights_checker", {"action": "checksum"}).get("ranks") or []
        if len(answer) != ranks:
            raise Refused(f"/weights_checker answers for {len(answer)} ranks, {ranks} were due")
        if ranks == 1:
            return dict(answer[0]["checksums"])
        return {
            ranked(name, row["parallelism_info"]["tp_rank"]): found
            for row in answer
            for name, found in row["checksums"].items()
        }

    # ---- adapters
    def load_adapter(self, name: str, config: Mapping[str, Any], tensors: str) -> None:
        """Load an adapter's tensors (`buckets.named`). From a folder a server that began with noise loads none."""
        body = {"lora_name": name, "config_dict": dict(config), "serialized_named_tensors": [tensors]}
        self._call("POST", "/load_lora_adapter_from_tensors", body)

    def unload_adapter(self, name: str) -> None:
        """Waits for the adapter's requests."""
        self._call("POST", "/unload_lora_adapter", {"lora_name": name})

    def adapters(self) -> list[str]:
        """Names of the adapters that the server lists."""
        rows: Sequence[Mapping[str, Any]] = self._call("GET", "/v1/models", None)["data"]
        return [str(row["id"]) for row in rows if row.get("parent")]

    # ---- memory
    def release_memory(self) -> None:
        self._call("POST", "/release_memory_occupation", {"tags": ["weights", "kv_cache"]})

    def resume_memory(self) -> None:
        self._call("POST", "/resume_memory_occupation", {"tags": ["weights", "kv_cache"]})

    def slow_down(self, seconds: float | None) -> None:
        """Seconds added to each forward pass: for tests of what happens in flight."""
        self._send("POST", "/slow_down", {"forward_sleep_time": seconds})

    # ---- inside
    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServerGone(f"{self.url}{path}: {error or type(error).__name__}") from None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        return answered(path, self._send(method, path, body))


def ranked(name: str, tp: int) -> str:
    """How a parameter of one of several ranks is called here."""
    return f"{name} on tp rank {tp}"


def answered(path: str, response: httpx.Response) -> dict[str, Any]:
    """The JSON object of a reply. Raises `Refused` with the server's words, `ServerGone` where it is not ready."""
    try:
        said = response.json() if response.content else {}
    except json.JSONDecodeError:
        said = {"message": response.text[:500]}
    if response.status_code == 503:
        raise ServerGone(f"{path}: {said}")
    if response.status_code != 200 or (isinstance(said, dict) and said.get("success") is False):
        raise Refused(f"{path} answers {response.status_code}: {_words(said)}")
    return said if isinstance(said, dict) else {"answer": said}


def _words(said: Any) -> str:
    if not isinstance(said, dict):
        return str(said)
    for key in ("error_message", "message", "error"):
        value = said.get(key)
        if isinstance(value, dict):
            value = value.get("message")
        if value:
            return str(value)
    return str(said)

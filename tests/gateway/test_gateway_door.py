"""The door: token, errors in one shape, health, numbers with bounded labels, and imports without torch."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from serving import SPEC, Server, problem

from syncline.gateway.app import create_app
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings

TOKEN = "s3cret-token"
ASKS = [
    ("GET", "/v1/jobs"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs/j0000000000"),
    ("GET", "/v1/jobs/j0000000000/trajectories/j0000000000-0-0/tokens/1"),
    ("GET", "/v1/jobs/j0000000000/events"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/path"),
]


@pytest.mark.parametrize(("method", "path"), ASKS)
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer ", "Bearer", f"bearer {TOKEN}", f"Bearer {TOKEN} ", "Bearer wrong", TOKEN, "Basic x"],
)
def test_nothing_is_told_without_the_token(
    guarded: Server, method: str, path: str, header: str | None
) -> None:
    headers = (
        {} if header is None else {"authorization": header.rstrip(" ") if header != "Bearer " else "Bearer"}
    )
    if header == f"Bearer {TOKEN} ":
        headers = {"authorization": f"Bearer {TOKEN}x"}
    answer = guarded.http.request(method, path, headers=headers)
    assert problem(answer, 401)["detail"] == "a valid bearer token is needed"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.fixture(scope="module")
def guarded(settings: Settings) -> Any:
    changed = msgspec.structs.replace(settings, token=TOKEN)
    bus = Bus(changed.redis_url, deadline=5)
    found = Server(changed, bus)
    yield found
    found.stop()
    bus.close()


def test_the_token_opens(guarded: Server) -> None:
    answer = guarded.http.get("/v1/jobs", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200


def test_two_tokens_are_none(guarded: Server) -> None:
    headers = [("authorization", "Bearer wrong"), ("authorization", f"Bearer {TOKEN}")]
    problem(guarded.http.get("/v1/jobs", headers=headers), 401)


def test_probes_need_no_token(guarded: Server) -> None:
    assert guarded.http.get("/healthz").status_code == 200
    assert guarded.http.get("/readyz").status_code == 200


def test_an_empty_token_is_refused_at_start(settings: Settings) -> None:
    with pytest.raises(ValueError, match="SYNCLINE_TOKEN"):
        Settings.read({"SYNCLINE_TOKEN": ""})
    with pytest.raises(ValueError, match="SYNCLINE_TOKEN"):
        create_app(msgspec.structs.replace(settings, token=""), Bus(settings.redis_url))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_an_open_host_needs_a_token(settings: Settings, host: str) -> None:
    bus = Bus(settings.redis_url)
    with pytest.raises(ValueError, match="SYNCLINE_HOST"):
        create_app(msgspec.structs.replace(settings, host=host), bus)
    create_app(msgspec.structs.replace(settings, host=host, token=TOKEN), bus)
    bus.close()


# ---- one shape for every error ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v2/jobs", 404),
        ("DELETE", "/v1/jobs", 405),
        ("PUT", "/v1/jobs/j0000000000", 405),
        ("GET", "/v1/jobs/j0000000000/cancel", 405),
        ("GET", "/v1/jobs?limit=none", 422),
    ],
)
def test_every_error_is_a_problem(server: Server, method: str, path: str, status: int) -> None:
    answer = server.http.request(method, path)
    problem(answer, status)
    if status == 405:
        assert answer.headers["allow"]


def test_a_redis_that_is_away_is_said_and_not_waited_for(another: Callable[..., Server]) -> None:
    lost = another(redis_url="redis://127.0.0.1:1/0")
    answer = lost.http.get("/v1/jobs")
    assert problem(answer, 503)["type"].endswith("redis-unreachable")
    assert answer.headers["retry-after"]
    ready = lost.http.get("/readyz")
    assert ready.status_code == 503
    assert "127.0.0.1:1" in ready.json()["why"]
    assert lost.http.get("/healthz").status_code == 200


def test_a_failure_inside_tells_no_more_than_that(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret path /x/y")

    monkeypatch.setattr("syncline.gateway.system.model_root.models", broken)
    answer = server.http.get("/v1/models")
    body = problem(answer, 500)
    assert "secret" not in answer.text
    assert "log" in body["detail"]


# ---- numbers ------------------------------------------------------------------------------------------------
def series(server: Server) -> set[str]:
    lines = server.http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


def test_the_number_of_series_does_not_grow_with_ids(server: Server) -> None:
    def ask(n: int) -> None:
        for i in range(n):
            server.http.get(f"/v1/jobs/j{i:010x}")
            server.http.get(f"/v1/jobs/j{i:010x}/trajectories/j{i:010x}-{i}-0")
            server.http.get(f"/nowhere/{i}")
            server.http.request("PROPFIND", f"/v1/jobs/j{i:010x}")

    ask(2)
    series(server)
    first = series(server)
    ask(60)
    assert series(server) == first
    assert not any(re.search(r"j00000000|nowhere|PROPFIND", name) for name in first)
    assert any('route="/v1/jobs/{job}"' in name for name in first)


# ---- the installation ---------------------------------------------------------------------------------------
def test_what_a_spec_may_name(server: Server) -> None:
    assert server.http.get("/v1/models").json() == {"items": ["tiny", "tiny-moe"]}
    assert {"bf16", "fp32"} <= server.http.get("/v1/recipes").json()["items"].keys()
    schema = server.http.get("/v1/schema").json()
    assert schema["title"] == "JobSpec"
    assert schema["additionalProperties"] is False


BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'torch', 'transformers'}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import syncline.gateway.app, syncline.gateway.__main__
assert 'torch' not in sys.modules
"""


def test_the_gateway_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_client_that_stops_speaking_is_let_go(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.gateway.door.BODY_SECONDS", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as speaker:
        speaker.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        said = speaker.recv(4096)
    assert b" 408 " in said.split(b"\r\n")[0]
    assert b"application/problem+json" in said


def test_the_door_stays_shut_for_a_large_head(server: Server) -> None:
    try:
        answer = httpx.get(f"{server.url}/v1/jobs", headers={"x": "a" * (1 << 20)}, timeout=30)
    except httpx.TransportError:
        return  # the server hung up, which is an answer too
    assert answer.status_code >= 400


def test_spec_examples_are_taken(server: Server, tmp_path: Path) -> None:
    """What the OpenAPI document shows is what the gateway takes."""
    document = server.http.get("/openapi.json").json()
    content = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]
    for kind, shown in content.items():
        body = shown["example"]
        if isinstance(body, dict):
            answer = server.http.post("/v1/jobs", json=body)
        else:
            answer = server.http.post("/v1/jobs", content=body, headers={"content-type": kind})
        assert answer.status_code == 201, answer.text
    assert SPEC["model"]["name"] == "tiny"


# ---- without a token, a strange web page gets nothing -------------------------------------------------------
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.evil", "", "[::2]", "[", "]", "a b"],
)
def test_a_name_that_only_resolves_here_is_refused(server: Server, host: str) -> None:
    problem(server.http.get("/v1/jobs", headers={"host": host}), 403)


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "127.1.2.3:9", "[::1]:8080"])
def test_this_machine_has_several_names(server: Server, host: str) -> None:
    assert server.http.get("/v1/jobs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://[", "http://localhost:1", "http://127.0.0.1"]
)
def test_a_strange_page_cannot_post_blindly(server: Server, origin: str) -> None:
    job = server.submit()
    problem(server.http.post(f"/v1/jobs/{job}/cancel", headers={"origin": origin}), 403)
    own = server.http.post(f"/v1/jobs/{job}/cancel", headers={"origin": server.url})
    assert own.status_code == 202

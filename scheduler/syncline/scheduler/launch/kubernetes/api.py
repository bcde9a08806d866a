"""The API server's door: the few verbs that a launcher needs, over the official client. Nothing else imports that.

Manifests are plain maps in both directions. The client's models are of its own release, and a cluster is of another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError

from syncline.scheduler.launch.kubernetes.plan import Raw

FIELDS = "syncline-scheduler"  # field manager: who owns what was applied
CONNECT, READ = 3.0, 10.0  # seconds for a connection, and between two bytes of an answer
OWN_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

PATHS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Service": "/api/v1/namespaces/{}/services",
    "Pod": "/api/v1/namespaces/{}/pods",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
}


class ApiError(RuntimeError):
    """The server refused, or did not answer. `status`: HTTP's, 0 without an answer."""

    def __init__(self, status: int, story: str) -> None:
        super().__init__(story)
        self.status = status


class Conflict(ApiError):
    """409: somebody wrote it since it was read, or it is there already."""


class Gone(ApiError):
    """410: what was asked for lies further back than the server remembers."""


class Missing(ApiError):
    """404: it is not there."""


class Invalid(ApiError):
    """400 or 422: no repetition would help."""


_KINDS: dict[int, type[ApiError]] = {400: Invalid, 404: Missing, 409: Conflict, 410: Gone, 422: Invalid}


class Api:
    """One namespace of one cluster."""

    def __init__(self, namespace: str, client: ApiClient | None = None) -> None:
        if client is None:
            config.load_config()  # type: ignore[no-untyped-call]
            client = ApiClient()
        self.namespace = namespace
        self._client = client
        # its discovery would ask for rights over the whole cluster, and the paths are known
        self._dynamic = DynamicClient(client, discoverer=lambda *_: None)  # type: ignore[no-untyped-call]

    def apply(self, body: Raw) -> Raw:
        """Server-side apply; what others own of the same fields becomes ours."""
        return self._send(
            "patch",
            self._path(body["kind"], body["metadata"]["name"]),
            body,
            content_type="application/apply-patch+yaml",
            field_manager=FIELDS,
            force_conflicts=True,
        )

    def create(self, body: Raw) -> Raw:
        """Make it. Raises `Conflict` if it is there."""
        return self._send("post", self._path(body["kind"]), body, field_manager=FIELDS)

    def replace(self, body: Raw) -> Raw:
        """Write it whole. Raises `Conflict` if it is not what `resourceVersion` says."""
        return self._send(
            "put", self._path(body["kind"], body["metadata"]["name"]), body, field_manager=FIELDS
        )

    def get(self, kind: str, name: str) -> Raw:
        """Read it. Raises `Missing`."""
        return self._send("get", self._path(kind, name))

    def delete(self, kind: str, name: str, uid: str, policy: str = "Background") -> None:
        """End it, if it is still the one with this uid. One that is gone, or another's by now, is no error."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": policy,
            "preconditions": {"uid": uid},
        }
        try:
            self._send("delete", self._path(kind, name), body)
        except (Missing, Conflict):
            return

    def list(self, kind: str, selector: str) -> tuple[list[Raw], str]:
        """All of a kind, and the resource version that a watch goes on from."""
        found = self._send("get", self._path(kind), label_selector=selector)
        items = [{**item, "kind": kind} for item in found.get("items") or []]
        return items, found["metadata"]["resourceVersion"]

    def watch(self, kind: str, selector: str, version: str, seconds: int) -> Iterator[tuple[str, Raw]]:
        """(type, object) of each change since `version`, for at most `seconds`; then it ends by itself.

        A server that goes silent for longer than that raises, as does one that ends the stream early. Raises `Gone`.
        """
        answer = self._ask(
            "get",
            self._path(kind),
            None,
            label_selector=selector,
            resource_version=version,
            timeout_seconds=seconds,
            watch=True,
            allow_watch_bookmarks=True,
            _request_timeout=(CONNECT, seconds + READ),
        )
        try:
            yield from self._events(answer)
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(0, f"watch of {kind}: {error}") from None
        finally:
            answer.close()
            answer.release_conn()

    def _events(self, answer: Any) -> Iterator[tuple[str, Raw]]:
        rest = b""
        for chunk in answer.stream(1 << 16, decode_content=False):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in filter(None, lines):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = int(event["object"].get("code", 0))
                    raise _KINDS.get(status, ApiError)(status, str(event["object"].get("message", "")))
                yield event["type"], event["object"]

    def serves(self, group: str) -> bool:
        """Whether the cluster has this group of kinds."""
        try:
            self._send("get", f"/apis/{group}")
        except Missing:
            return False
        return True

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()  # type: ignore[no-untyped-call]

    def _path(self, kind: str, name: str | None = None) -> str:
        path = PATHS[kind].format(self.namespace)
        return path if name is None else f"{path}/{name}"

    def _send(self, method: str, path: str, body: Raw | None = None, **more: Any) -> Raw:
        answer = self._ask(method, path, body, _request_timeout=(CONNECT, READ), **more)
        read: Raw = json.loads(answer.data)
        return read

    def _ask(self, method: str, path: str, body: Raw | None, **more: Any) -> Any:
        try:
            return self._dynamic.request(
                method, path, body=body, query_params=[], header_params={}, serialize=False, **more
            )
        except DynamicApiError as error:
            status = int(error.status or 0)
            raise _KINDS.get(status, ApiError)(status, f"{method} {path}: {_message(error)}") from None
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(0, f"{method} {path}: {error}") from None


def own_namespace() -> str:
    """The namespace that this pod is in. Raises `ValueError` outside of a pod."""
    try:
        with open(OWN_NAMESPACE) as file:
            return file.read().strip()
    except OSError as error:
        raise ValueError(f"launcher.yaml names no namespace, and this is no pod: {error}") from None


def _message(error: DynamicApiError) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)

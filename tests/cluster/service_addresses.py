"""What a kube-proxy does for the test kubelet: a Service's name leads to one of its ready pods, whichever is there now.

A machine without the cluster's DNS does not know the names. So where a variable of a container names a Service
(`http://NAME:PORT`), an address of this machine is put in its place, at which connections are passed on.
"""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from kubelet import Kubelet, PodRun

_NAMED = re.compile(r"(?<=http://)([a-z][a-z0-9-]*):(\d+)")


class Services:
    """The Services of a namespace, as its pods reach them."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet, self._lock = kubelet, threading.Lock()
        self._servers: dict[tuple[str, int], _Server] = {}

    def resolved(self, text: str) -> str:
        """`text`, its Services' names replaced."""
        return _NAMED.sub(lambda found: self._address(found[1], int(found[2])) or found[0], text)

    def stop(self) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def _address(self, name: str, port: int) -> str | None:
        with self._lock:
            if (name, port) not in self._servers:
                try:
                    path = f"/api/v1/namespaces/{self._kubelet.namespace}/services/{name}"
                    spec = self._kubelet.rest.get(path)["spec"]
                except httpx.HTTPStatusError as error:
                    if error.response.status_code != 404:
                        raise
                    return None
                target = next(one["targetPort"] for one in spec["ports"] if one["port"] == port)
                server = _Server(
                    (self._kubelet.next_address(), port), self._kubelet, spec["selector"], target
                )
                threading.Thread(target=server.serve_forever, args=(0.1,), name=name, daemon=True).start()
                self._servers[name, port] = server
            host, at = self._servers[name, port].server_address[:2]
            return f"{host!s}:{at}"


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address, block_on_close = True, True, False

    def __init__(self, at: tuple[str, int], kubelet: Kubelet, selector: dict[str, str], target: Any) -> None:
        super().__init__(at, _Passing)
        self._kubelet, self._selector, self._target = kubelet, selector, target

    def endpoint(self) -> tuple[str, int] | None:
        """Address of a ready pod; None: there is none."""
        for run in list(self._kubelet.pods.values()):
            ready = all(container.ready for container in run.containers)
            if ready and self._selector.items() <= run.labels.items():
                return run.address, self._port(run)
        return None

    def _port(self, run: PodRun) -> int:
        if isinstance(self._target, int):
            return self._target
        ports = [port for container in run.containers for port in container.spec.get("ports", [])]
        return next(int(port["containerPort"]) for port in ports if port["name"] == self._target)


class _Passing(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        there = self.server.endpoint()
        if there is None:
            return
        try:
            with socket.create_connection(there, timeout=10) as other:
                other.settimeout(None)
                back = threading.Thread(target=_pump, args=(other, self.request), daemon=True)
                back.start()
                _pump(self.request, other)
                back.join()
        except OSError:
            return  # the client sees a connection that ended, as from a pod that has gone


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
    finally:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

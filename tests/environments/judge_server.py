"""A judge over real HTTP whose answers the test writes."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

Reply = (
    tuple[int, Any] | tuple[int, Any, Mapping[str, str]]
)  # status, body (bytes, or what becomes JSON), headers
Play = Callable[[list[dict[str, Any]]], Reply]


def rewards(asked: list[dict[str, Any]], **rest: Any) -> Reply:
    """Each response is worth its length over ten."""
    told = [{"trajectory": one["trajectory"], "reward": len(one["response"]) / 10} for one in asked]
    return 200, {"rewards": told, **rest}


class JudgeServer:
    """Listens at once. `play` is called with the responses of each request."""

    def __init__(self, play: Play, port: int = 0) -> None:
        self.asked: list[list[str]] = []  # trajectories of each request
        self.times: list[float] = []
        self.traceparents: list[str | None] = []
        self.most = 0  # requests at a time
        self._now, self._lock = 0, threading.Lock()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.traceparents.append(self.headers.get("traceparent"))
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server._count(body["responses"]):
                    status, told, *headers = play(body["responses"])
                data = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        class Quiet(http.server.ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """Whoever asked has gone: that is what some tests are about."""

        self._server = Quiet(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/judge"
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _count(self, asked: list[dict[str, Any]]) -> _Counted:
        return _Counted(self, asked)

    def enter(self, asked: list[dict[str, Any]]) -> None:
        with self._lock:
            self.asked.append([one["trajectory"] for one in asked])
            self.times.append(time.monotonic())
            self._now += 1
            self.most = max(self.most, self._now)

    def leave(self) -> None:
        with self._lock:
            self._now -= 1


class _Counted:
    def __init__(self, server: JudgeServer, asked: list[dict[str, Any]]) -> None:
        self._server, self._asked = server, asked

    def __enter__(self) -> None:
        self._server.enter(self._asked)

    def __exit__(self, *_: object) -> None:
        self._server.leave()

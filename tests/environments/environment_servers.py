"""Servers that the adapters over the network are tested against: real HTTP, real WebSockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COUNTS: dict[str, int] = {}
FAILING: dict[str, list[int]] = {}  # path -> statuses that it answers first


class Guessing(BaseHTTPRequestHandler):
    """A number between 0 and 9 is to be guessed, at most twice; what it is follows from seed and index."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        COUNTS[self.path] = COUNTS.get(self.path, 0) + 1
        if FAILING.get(self.path):
            self.send_error(FAILING[self.path].pop(0))
            return
        body = json.dumps(self._answer(asked)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        right = str((asked["seed"] + asked["index"]) % 10)
        turns = [turn["text"] for turn in asked.get("turns", [])]
        match self.path:
            case "/game/prompt":
                return {"text": f"guess {asked['index']}:", "meta": {"answer": right}}
            case "/game/step":
                if turns[-1] == right or len(turns) == 2:
                    return {"done": True}
                return {"done": False, "observed": [{"role": "tool", "content": "no"}]}
            case "/game/score":
                return {"reward": None if turns == ["?"] else float(right in turns) / max(len(turns), 1)}
        return {"nothing": "here"}

    def log_message(self, *args: object) -> None:
        """Nothing."""


@contextmanager
def guessing() -> Iterator[str]:
    """Its address."""
    FAILING.clear()
    COUNTS.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Guessing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def counting() -> Iterator[str]:
    """An OpenEnv server, as its library's own: each session counts down from seed % 5 + 2; a "-" costs one step."""
    from websockets.sync.server import ServerConnection, serve

    def session(wire: ServerConnection) -> None:
        left = -1
        for raw in wire:
            message = json.loads(raw)
            reward = None
            if message["type"] == "reset":
                left = message["data"]["seed"] % 5 + 2
            elif left <= 0:
                wire.send(
                    json.dumps({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "done"}})
                )
                continue
            else:
                good = message["data"].get("message") == "-"
                left -= good
                reward = 1.0 if good else -0.5
            data = {"observation": {"left": left, "metadata": {}}, "reward": reward, "done": left == 0}
            wire.send(json.dumps({"type": "observation", "data": data}))

    def route(wire: ServerConnection) -> None:
        assert wire.request is not None
        if wire.request.path != "/ws":
            wire.close()
        elif COUNTS.get("full", 0):
            COUNTS["full"] -= 1
            wire.recv()
            wire.send(
                json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1"}})
            )
        else:
            session(wire)

    with serve(route, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()

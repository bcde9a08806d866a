"""`Server`: a real gateway served by uvicorn in a thread; `problem`: what every refusal must look like."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import uvicorn
from waiting import wait_until

from syncline.contract.streams import JOB
from syncline.gateway.app import create_app
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings

SPEC: dict[str, Any] = {"name": "run", "model": {"name": "tiny", "weights": "random"}}


class Server:
    """One serving gateway."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self.settings, self.bus = settings, bus
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(128)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.app = create_app(settings, bus)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(self.app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
        )
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        wait_until(lambda: self._uvicorn.started, 20, "uvicorn serving")
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def stop(self) -> None:
        self.http.close()
        self._uvicorn.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def submit(self, **changes: Any) -> str:
        """Id of a new job with these top-level keys changed."""
        answer = self.http.post("/v1/jobs", json={**SPEC, **changes})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def set_state(self, job: str, state: str) -> None:
        """What the scheduler does."""
        self.bus.hset(JOB.at(job), "state", state)


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The problem that `answer` is, its shape checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = json.loads(answer.content)
    assert {"type", "title", "status", "detail"} <= body.keys()
    assert body["type"].startswith("urn:syncline:problem:")
    assert body["status"] == status
    assert body["detail"]
    return body

"""A real gateway on a real Redis: uvicorn in a thread, a model root and a run root of its own."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
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
        self._socket = socket.create_server(("127.0.0.1", 0))
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


@pytest.fixture(scope="session")
def own_redis(redis_url: str) -> str:
    """A database of the session's server that no other suite uses."""
    return f"{redis_url}?db=7"


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `tiny` and `tiny-moe`; `way-out` is a link that leads out, `empty` has no config."""
    outside = tmp_path_factory.mktemp("outside")
    root = tmp_path_factory.mktemp("models")
    for folder in (outside / "way-out", root / "tiny", root / "tiny-moe"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (root / "way-out").symlink_to(outside / "way-out")
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="session")
def settings(own_redis: str, model_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings.read(
        {
            "SYNCLINE_REDIS_URL": own_redis,
            "SYNCLINE_MODELS": str(model_root),
            "SYNCLINE_RUNS": str(tmp_path_factory.mktemp("runs")),
        }
    )


@pytest.fixture(scope="session")
def server(settings: Settings) -> Iterator[Server]:
    bus = Bus(settings.redis_url, deadline=5)
    found = Server(settings, bus)
    yield found
    found.stop()
    bus.close()


@pytest.fixture
def another(settings: Settings) -> Iterator[Callable[..., Server]]:
    """Makes gateways with settings changed."""
    made: list[Server] = []

    def make(**changes: Any) -> Server:
        changed = msgspec.structs.replace(settings, **changes)
        made.append(Server(changed, Bus(changed.redis_url, deadline=0.3)))
        return made[-1]

    yield make
    for one in made:
        one.stop()
        one.bus.close()


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

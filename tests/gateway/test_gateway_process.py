"""The gateway as a process: it says where it answers, stops when told, and leaves nothing behind that matters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import SPEC
from waiting import wait_until

from syncline.contract.events import Heartbeat
from syncline.contract.streams import HEARTBEAT
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.settings import Settings

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(settings: Settings, tmp_path: Path) -> Iterator[Start]:
    """Starts gateways on a run root of their own."""
    started: list[subprocess.Popen[str]] = []

    def run(**environ: str) -> subprocess.Popen[str]:
        given = {**os.environ, **settings.environ(), "SYNCLINE_RUNS": str(tmp_path), "SYNCLINE_PORT": "0"}
        process = subprocess.Popen(
            [sys.executable, "-m", "syncline.gateway"],
            env={**given, **environ},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def announced(runs: Path, process: subprocess.Popen[str]) -> str:
    """URL of a gateway that answers."""

    def said() -> dict[str, Any] | None:
        assert process.poll() is None, process.communicate()[1]
        path = runs / "gateway.json"
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found if found and found["pid"] == process.pid else None

    found = wait_until(said, 30, "gateway.json")
    assert found is not None
    url = str(found["url"])
    wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, 20, "a ready gateway")
    return url


def test_it_serves_and_stops_with_a_stream_open(start: Start, settings: Settings, tmp_path: Path) -> None:
    process = start()
    url = announced(tmp_path, process)
    job = httpx.post(f"{url}/v1/jobs", json=SPEC).json()["id"]
    bus = Bus(settings.redis_url)

    def beat() -> Heartbeat | None:
        raw = bus.get(HEARTBEAT.at("gateway/gateway"))
        told = unpack(raw, Heartbeat) if raw else None
        return told if told and told.ready and told.pid == process.pid else None

    ready = wait_until(beat, 10, "a ready heartbeat")
    assert ready is not None
    assert url.endswith(f":{ready.port}")
    lines: list[str] = []

    def watch() -> None:
        with httpx.stream("GET", f"{url}/v1/jobs/{job}/events", timeout=30) as answer:
            lines.extend(answer.iter_lines())

    watcher = threading.Thread(target=watch)
    watcher.start()
    wait_until(lambda: "streams 1.0" in httpx.get(f"{url}/metrics").text, 10, "an open stream")
    with httpx.Client(base_url=url) as http:  # one connection: no delay between its requests
        began = time.monotonic()
        for _ in range(20):
            assert http.get(f"/v1/jobs/{job}").status_code == 200
        assert time.monotonic() - began < 20 * 0.03
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    watcher.join(15)
    assert any("queued" in line for line in lines)
    assert bus.get(HEARTBEAT.at("gateway/gateway")) is None
    bus.close()


def test_a_killed_gateway_is_replaced_and_knows_all(start: Start, tmp_path: Path) -> None:
    first = start()
    url = announced(tmp_path, first)
    job = httpx.post(f"{url}/v1/jobs", json=SPEC, headers={"idempotency-key": "over-a-kill"}).json()
    first.kill()
    first.wait(10)
    second = start()
    url = announced(tmp_path, second)
    again = httpx.post(f"{url}/v1/jobs", json=SPEC, headers={"idempotency-key": "over-a-kill"})
    assert (again.status_code, again.json()) == (200, job)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SYNCLINE_TOKEN": ""}, "SYNCLINE_TOKEN is empty"),
        ({"SYNCLINE_HOST": "0.0.0.0"}, "set SYNCLINE_TOKEN"),
        ({"SYNCLINE_HOST": "203.0.113.7", "SYNCLINE_TOKEN": "x"}, "cannot listen on 203.0.113.7"),
        ({"SYNCLINE_PORT": "http"}, "SYNCLINE_PORT"),
    ],
)
def test_a_wrong_setting_is_said_and_not_served(start: Start, environ: dict[str, str], said: str) -> None:
    process = start(**environ)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said in told
    assert "Traceback" not in told

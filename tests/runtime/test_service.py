"""The frame of a process, with real processes: health, heartbeat, stopping, failing fast, one writer at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from server import own_server
from waiting import wait_until

from syncline.contract.events import Event, Failed, Heartbeat, WorkerUp
from syncline.contract.streams import EVENTS, HEARTBEAT, LOCK
from syncline.runtime.bus import Bus, unpack

Start = Callable[..., "subprocess.Popen[str]"]
MAIN = Path(__file__).with_name("service_main.py")


@pytest.fixture
def bus(redis_url: str) -> Bus:
    return Bus(redis_url)


@pytest.fixture
def start(redis_url: str, job: str, tmp_path: Path) -> Iterator[Start]:
    """Start a service of this job; all are killed in the end."""
    running: list[subprocess.Popen[str]] = []

    def begin(behaviour: str, **environ: str) -> subprocess.Popen[str]:
        settings = {
            "SYNCLINE_REDIS_URL": redis_url,
            "SYNCLINE_JOB": job,
            "SYNCLINE_RUNS": str(tmp_path / "runs"),
            **environ,
        }
        process = subprocess.Popen(
            [sys.executable, str(MAIN), behaviour],
            env={**os.environ, **settings},
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def beat(bus: Bus, job: str, name: str = "sync") -> Heartbeat | None:
    raw = bus.get(HEARTBEAT.at(f"{job}/sync/{name}"))
    return None if raw is None else unpack(raw, Heartbeat)


def ready(bus: Bus, job: str, name: str = "sync") -> Heartbeat:
    def is_ready() -> Heartbeat | None:
        now = beat(bus, job, name)
        return now if now is not None and now.ready else None

    return wait_until(is_ready, 30, f"{name} is ready") or pytest.fail("never")


def test_a_service_lives_and_stops_when_told(bus: Bus, job: str, start: Start) -> None:
    process = start("wait", SYNCLINE_WORKER="w7")
    now = ready(bus, job, "w7")
    assert (now.service, now.name, now.pid, now.why) == ("sync", "w7", process.pid, "")
    address = f"http://127.0.0.1:{now.port}"
    assert httpx.get(f"{address}/health").status_code == 200
    assert httpx.get(f"{address}/ready").json() == {"service": "sync", "name": "w7", "ready": True, "why": ""}
    assert httpx.get(f"{address}/other").status_code == 404
    wait_until(lambda: (b := beat(bus, job, "w7")) is not None and b.at > now.at, 10, "it beats again")
    later = beat(bus, job, "w7")
    assert later is not None
    assert later.incarnation == now.incarnation
    [entry] = bus.range(EVENTS.at(job))
    assert unpack(entry, Event) == WorkerUp(who="w7", incarnation=now.incarnation)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert beat(bus, job, "w7") is None
    assert all(f" {job}/sync/w7 " in line for line in log.splitlines())
    assert "told to stop (SIGTERM)" in log


@pytest.mark.parametrize(("behaviour", "where"), [("fail", ""), ("fail_in_thread", "thread loader: ")])
def test_a_failure_ends_the_process_and_is_told(
    bus: Bus, job: str, start: Start, behaviour: str, where: str
) -> None:
    process = start(behaviour)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "KeyError: 'no such tensor'" in log
    [entry] = bus.range(EVENTS.at(job))
    assert unpack(entry, Event) == Failed(who="sync", reason=f"{where}KeyError: 'no such tensor'")


def test_wrong_settings_are_one_clear_line(start: Start, redis_url: str) -> None:
    for environ, story in (
        ({"SYNCLINE_PORT": "many"}, "sync: SYNCLINE_PORT 'many' must be a port number from 0 (any) to 65535"),
        ({"SYNCLINE_REDIS_URL": "http://x"}, "sync: SYNCLINE_REDIS_URL 'http://x' must begin with one of"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "x:4318"}, "sync: OTEL_EXPORTER_OTLP_ENDPOINT 'x:4318' must begin"),
    ):
        process = start("wait", **environ)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 1
        [line] = log.splitlines()
        assert line.startswith(story)


def test_a_service_refuses_a_server_that_may_evict(start: Start) -> None:
    with own_server(maxmemory_policy="allkeys-lru") as server:
        process = start("wait", SYNCLINE_REDIS_URL=server.url)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "set it to 'noeviction'" in log


def test_the_next_writer_waits_until_the_last_has_given_up_its_lease(
    bus: Bus, job: str, start: Start
) -> None:
    first = start("hold")
    held = ready(bus, job)
    assert bus.get(LOCK.at(f"{job}/sync")) == held.incarnation.encode()
    second = start("hold", SYNCLINE_WORKER="second")
    wait_until(lambda: (b := beat(bus, job, "second")) and b.why == "waits for the lease", 30, "it waits")
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 0
    now = ready(bus, job, "second")
    assert bus.get(LOCK.at(f"{job}/sync")) == now.incarnation.encode()
    third = start("hold", SYNCLINE_WORKER="third")
    wait_until(lambda: (b := beat(bus, job, "third")) and b.why == "waits for the lease", 30, "it waits")
    third.send_signal(signal.SIGTERM)
    assert third.wait(30) == 0
    assert second.poll() is None


def test_a_frozen_writer_that_wakes_up_finds_its_lease_gone_and_ends(
    bus: Bus, job: str, start: Start
) -> None:
    frozen = start("hold")
    ready(bus, job)
    frozen.send_signal(signal.SIGSTOP)
    heir = start("hold", SYNCLINE_WORKER="heir")
    ready(bus, job, "heir")
    frozen.send_signal(signal.SIGCONT)
    _, log = frozen.communicate(timeout=30)
    assert frozen.returncode == 1
    assert "this process was silent for too long and must not write any more" in log
    assert heir.poll() is None
    kinds = [type(unpack(entry, Event)) for entry in bus.range(EVENTS.at(job))]
    assert kinds == [WorkerUp, WorkerUp]  # the job has not failed: another one writes now

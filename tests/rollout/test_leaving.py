"""What a worker owes those who keep it: to go when it is told, with nothing kept back, and to say when it is ready."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path

import msgspec
from waiting import wait_until
from worker_world import World, world

from syncline.contract import events
from syncline.contract.streams import CLAIMS, HEARTBEAT
from syncline.runtime.bus import unpack

IDLE = 300.0  # seconds of silence before others take over: more than a test may take
# at this pace they take w0 half a minute, and w1, or a w0 that was told to stop, a second
LONG = {"max_tokens": 400, "length_median": 400, "length_sigma": 0.1}
SLOW = {"pace": [0.02, 1.0]}


def samples(w: World) -> bool:
    status = w.status()
    return status is not None and status.running > 4


def test_a_worker_told_to_stop_hands_back_what_it_holds(redis_url: str, job: str, tmp_path: Path) -> None:
    """Others take it at once, and not when they would have had to think it dead."""
    limits = {"worker_idle": IDLE}
    with world(redis_url, job, tmp_path, rollout=SLOW, sampling=LONG, limits=limits) as w:
        process = w.start("w0")
        w.phase()
        w.install(0)
        wanted = w.submit(3)
        wait_until(lambda: samples(w), 30, "w0 samples")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        w.start("w1")
        w.install(0, "w1")
        records = w.wait_published(wanted)
        assert {record.spans[0].worker for record in records.values() if record.attempt == 2} == {"w1"}
        assert max(record.attempt for record in records.values()) == 2


def test_a_worker_with_time_to_drain_ends_what_it_began(redis_url: str, job: str, tmp_path: Path) -> None:
    limits = {"worker_idle": IDLE}
    with world(redis_url, job, tmp_path, rollout=SLOW, sampling=LONG, limits=limits) as w:
        w.settings = msgspec.structs.replace(w.settings, drain=60.0)
        process = w.start("w0")
        w.phase()
        w.install(0)
        wanted = w.submit(3)
        wait_until(lambda: samples(w), 30, "w0 samples")
        assert not w.published(), "what it began is under way"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        begun = {entry.trajectory for entry in w.ledger.entries(wanted).values() if entry.worker == "w0"}
        published = {record.trajectory: record.attempt for record in w.published()}
        assert len(begun) > 4
        assert published == dict.fromkeys(begun, 1)


def test_a_worker_too_many_ends_what_it_began_begins_nothing_and_says_so(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    rollout = {"pace": [1.0, 0.2]}
    with world(redis_url, job, tmp_path, rollout=rollout, sampling=LONG, limits={"worker_idle": IDLE}) as w:
        process = w.start("w1")
        w.phase(workers=2)
        w.install(0, "w1")
        w.submit(3)
        wait_until(lambda: (s := w.status("w1")) is not None and s.running > 4, 30, "w1 samples")
        left = w.phase(workers=1)
        w.event(events.Woke, lambda event: event.seq == left)
        late = w.submit(1)
        w.event(events.Emptied, lambda event: (event.who, event.seq) == ("w1", left))
        published = w.published()
        assert len(published) > 4
        assert {record.attempt for record in published} == {1}, "nothing that it had begun was given away"
        assert {line.worker for line in w.ledger.entries(late).values()} == {None}
        assert process.poll() is None, "who ends it is the launcher"
        w.phase(workers=2)  # it is wanted again
        wait_until(lambda: all(line.worker == "w1" for line in w.ledger.entries(late).values()), 30, "work")


def test_ready_means_a_verified_version_inside_the_bound_or_sleep_by_order(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    with world(redis_url, job, tmp_path, schedule={"max_lag": 2}) as w:
        w.start("w0")
        w.phase()
        assert "no verified version" in unready(w, "no verified version")
        w.install(0)
        ready(w)
        w.bus.hset(CLAIMS.at(job), "version", "1")
        ready(w)
        w.bus.hset(CLAIMS.at(job), "version", "2")  # what is sampled now could only be trained with lag 3
        assert "behind the bound" in unready(w, "behind the bound")
        w.install(1)
        ready(w)
        asleep = w.phase(rollout="asleep", gate="shut")
        w.event(events.Slept, lambda event: event.seq == asleep)
        ready(w)
        assert ask(w, "/started")[0] == ask(w, "/health")[0] == 200


def ready(w: World) -> None:
    wait_until(lambda: ask(w, "/ready")[0] == 200, 30, "ready")


def unready(w: World, why: str) -> str:
    """What the probe says, once it says so."""
    return str(
        wait_until(lambda: (s := ask(w, "/ready"))[0] == 503 and why in s[1] and s[1], 30, f"unready: {why}")
    )


def ask(w: World, path: str) -> tuple[int, str]:
    """(status, why) of the worker's health endpoint."""
    key = HEARTBEAT.at(f"{w.job}/rollout/w0")
    beat = unpack(wait_until(lambda: w.bus.get(key), 30, "a heartbeat"), events.Heartbeat)
    assert beat.port is not None
    connection = http.client.HTTPConnection("127.0.0.1", beat.port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, str(json.loads(answer.read())["why"])
    finally:
        connection.close()

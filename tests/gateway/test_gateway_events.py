"""The event stream: order, resume without loss or repetition, its end, and its limits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from left_behind import metrics, minted, phase, sample
from serving import Server, problem
from waiting import wait_until

from syncline.contract.streams import EVENTS, METRICS, PHASES, SAMPLES
from syncline.gateway import access, events
from syncline.runtime.bus import Bus


class Sent:
    """One server-sent event."""

    def __init__(self, fields: dict[str, str]) -> None:
        self.id, self.name = fields["id"], fields["event"]
        self.data: dict[str, Any] = json.loads(fields["data"])


def listen(server: Server, job: str, last: str | None = None) -> Iterator[Sent]:
    """Events until the stream ends."""
    headers = {} if last is None else {"last-event-id": last}
    with server.http.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            if not line and fields:
                yield Sent(fields)
                fields = {}
            elif line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value


def a_whole_job(bus: Bus, job: str, updates: int) -> list[str]:
    """Writes a job's streams; returns the names of its events in order."""
    order = []
    for n in range(1, updates + 1):
        bus.append(PHASES.at(job), phase(n))
        bus.append(EVENTS.at(job), minted(n))
        bus.append(METRICS.at(job), metrics(n))
        bus.append(SAMPLES.at(job), sample(float(n)))
        order += ["phase", "event", "metrics", "ledger"]
    return order


def test_an_ended_job_is_told_from_its_beginning(server: Server) -> None:
    job = server.submit()
    a_whole_job(server.bus, job, 3)
    server.set_state(job, "succeeded")
    told = list(listen(server, job))
    assert (told[0].name, told[0].data) == ("state", {"job": job, "state": "succeeded"})
    assert (told[-1].name, told[-1].data) == ("end", {"job": job, "state": "succeeded"})
    assert sorted(one.name for one in told[1:-1]) == sorted(["phase", "event", "metrics", "ledger"] * 3)
    versions = [one.data for one in told if one.name == "event"]
    assert versions == [{"type": "minted", "version": f"0.{n}"} for n in (1, 2, 3)]
    assert [one.data["update"] for one in told if one.name == "metrics"] == [1, 2, 3]


@pytest.mark.parametrize("seen", [1, 2, 5, 12])
def test_a_client_that_comes_back_gets_the_rest_once(server: Server, seen: int) -> None:
    job = server.submit()
    a_whole_job(server.bus, job, 3)
    server.set_state(job, "failed")
    whole = [(one.name, one.data) for one in listen(server, job) if one.name not in ("state", "end")]
    first = [one for one in listen(server, job) if one.name not in ("state", "end")][:seen]
    rest = [one for one in listen(server, job, first[-1].id) if one.name not in ("state", "end")]
    assert [(one.name, one.data) for one in first + rest] == whole


def test_many_entries_keep_their_order(server: Server) -> None:
    """More than one read takes from one stream, and the other's entries belong between."""
    job = server.submit()
    written: dict[tuple[str, float], tuple[int, ...]] = {}
    for n in range(250):
        id = server.bus.append(SAMPLES.at(job), sample(float(n)))
        written["ledger", n] = tuple(map(int, id.split("-")))
        if n % 100 == 50:
            id = server.bus.append(PHASES.at(job), phase(n))
            written["phase", n] = tuple(map(int, id.split("-")))
    server.set_state(job, "succeeded")
    told = [one for one in listen(server, job) if one.name in ("ledger", "phase")]
    places = [(one.name, one.data["at"] if one.name == "ledger" else one.data["seq"]) for one in told]
    assert sorted(places) == sorted(written)
    assert [written[place] for place in places] == sorted(written.values())


def test_events_arrive_while_they_happen(server: Server) -> None:
    job = server.submit()
    got: list[Sent] = []
    thread = threading.Thread(target=lambda: got.extend(listen(server, job)))
    thread.start()
    wait_until(lambda: server.app.state.gateway.streaming.total() > 0, 10, "a stream being served")
    server.bus.append(EVENTS.at(job), minted(1))
    server.set_state(job, "running")
    server.bus.append(EVENTS.at(job), minted(2))
    server.set_state(job, "succeeded")
    thread.join(20)
    assert [one.data["version"] for one in got if one.name == "event"] == ["0.1", "0.2"]
    assert got[-1].name == "end"
    wait_until(lambda: server.app.state.gateway.streaming.total() == 0, 10, "the stream forgotten")


def test_an_unreadable_entry_is_told_and_passed(server: Server) -> None:
    job = server.submit()
    server.bus.append(EVENTS.at(job), {b"m": b"\xc1"})
    server.bus.append(EVENTS.at(job), minted(1))
    server.set_state(job, "succeeded")
    told = list(listen(server, job))
    assert [one.name for one in told] == ["state", "unreadable", "event", "end"]
    assert told[1].data["stream"] == "event"


@pytest.mark.parametrize(
    "last", ["x", "0-0", "0-0_0-0_0-0", "0-0_0-0_0-0_x", "0-0_0-0_0-0_0-99999999999999999999"]
)
def test_a_strange_last_event_is_refused(server: Server, last: str) -> None:
    job = server.submit()
    problem(server.http.get(f"/v1/jobs/{job}/events", headers={"last-event-id": last}), 422)


def test_streams_are_limited_and_other_routes_answer_meanwhile(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = server.submit()
    monkeypatch.setattr(events, "MAX_STREAMS", 3)
    opened = [httpx.Client(base_url=server.url, timeout=30) for _ in range(3)]
    streams = [client.stream("GET", f"/v1/jobs/{job}/events") for client in opened]
    for stream in streams:
        assert stream.__enter__().status_code == 200
    wait_until(lambda: server.app.state.gateway.streaming.total() == 3, 10, "three streams")
    body = problem(server.http.get(f"/v1/jobs/{job}/events"), 503)
    assert body["type"].endswith("too-many-streams")
    assert server.http.get(f"/v1/jobs/{job}").status_code == 200
    for stream in streams:
        stream.__exit__(None, None, None)
    wait_until(lambda: server.app.state.gateway.streaming.total() == 0, 10, "the streams forgotten")
    assert access.MAX_STREAMS == 64

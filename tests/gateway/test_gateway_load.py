"""The short form of `bench/gateway_load.py`: what must not grow with history or ledger, and clients that stall."""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from left_behind import ledger
from serving import Server, problem
from waiting import wait_until

from syncline.contract.events import LedgerSample
from syncline.contract.streams import ENTRIES, JOBS, SAMPLES
from syncline.gateway import events, large_jobs
from syncline.gateway.records import find
from syncline.runtime.bus import pack

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """`bench/gateway_load.py`, which is no package's."""
    spec = importlib.util.spec_from_file_location("gateway_load", ROOT / "bench" / "gateway_load.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["gateway_load"] = made
    spec.loader.exec_module(made)
    return made


def test_mixed_calls_of_many_clients(bench: ModuleType) -> None:
    given = Namespace(
        clients=40, jobs=300, trajectories=24_000, seconds=3.0, stalled=0, most_mb=400.0, json=None
    )
    told = bench.measured(given)
    assert told["failed"] == []
    assert told["requests"] > 40
    assert {"200", "201"} >= told["statuses"].keys()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_five_hundred_clients_ten_thousand_jobs_a_million_trajectories(bench: ModuleType) -> None:
    given = Namespace(
        clients=500, jobs=10_000, trajectories=1_000_000, seconds=60.0, stalled=20, most_mb=1500.0, json=None
    )
    assert bench.measured(given)["failed"] == []


def test_a_client_that_reads_nothing_is_dropped(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its events are not kept for it: what is sent ahead ends with the connection's own buffers."""
    monkeypatch.setattr(events, "STALLED", 1.0)
    job = server.submit()
    sample = pack(
        LedgerSample(
            submitted=1, running=1, buffered=0, trained=0, filtered=0, failed=0, expired=0, holds=True, at=1.0
        )
    )
    for _ in range(8):
        server.bus.many([("XADD", SAMPLES.at(job), "*", "m", sample) for _ in range(5000)])
    before = psutil.Process().memory_info().rss
    host, _, port = server.url.removeprefix("http://").partition(":")
    streaming = server.app.state.gateway.streaming
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        wait_until(lambda: streaming.total() == 1, 20, "a stream being served")
        wait_until(lambda: streaming.total() == 0, 60, "the end of a stream that nobody reads")
    assert psutil.Process().memory_info().rss - before < 64 * 1024 * 1024
    wait_until(lambda: "event stream is dropped" in caplog.text, 10, "a word about it")
    assert "Traceback" not in caplog.text


def test_a_listing_looks_at_its_page_alone(server: Server) -> None:
    """The order of jobs is kept between requests; a job that comes or goes is seen at once."""
    made = [server.submit() for _ in range(5)]
    gateway = server.app.state.gateway

    def listed() -> list[str]:
        items = server.http.get("/v1/jobs", params={"limit": 5}).json()["items"]
        return [str(item["id"]) for item in items]

    assert listed() == made[::-1]
    scans = 0
    real = gateway.history._ordered

    def counted(*given: object) -> object:
        nonlocal scans
        scans += 1
        return real(*given)

    gateway.history._ordered = counted
    try:
        assert [listed() for _ in range(3)] == [made[::-1]] * 3
        assert scans == 0
        newest = server.submit()
        assert listed() == [newest, *made[:0:-1]]
        assert scans == 1
        server.bus.call("ZREM", JOBS.at(), newest)
        assert listed()[0] == made[-1]
    finally:
        del gateway.history._ordered


def test_a_large_report_is_made_once_for_all_who_ask(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_jobs, "LARGE", 1)
    monkeypatch.setattr(large_jobs, "PATIENCE", 0.2)
    job = server.submit()
    record = find(server.bus, server.settings, job)
    assert record is not None
    ledger(server, job)
    server.bus.hset(ENTRIES.at(job), f"{job}-0-0", b"x")
    desk = large_jobs.LargeJobs(server.bus)
    begun, go_on, made = threading.Event(), threading.Event(), []

    def slow() -> bytes:
        begun.set()
        assert go_on.wait(30)
        made.append(time.monotonic())
        return b"told"

    answers: list[bytes] = []
    first = threading.Thread(target=lambda: answers.append(desk.answer(record, "summary", slow)))
    first.start()
    assert begun.wait(20)
    with pytest.raises(Exception, match="being made"):  # nobody waits longer than PATIENCE for a first answer
        desk.answer(record, "summary", slow)
    go_on.set()
    first.join(30)
    monkeypatch.setattr(large_jobs, "AS_LONG", 0.0)
    desk._made[job, "summary"] = (0.0, b"told before")  # grown old
    begun.clear()
    go_on.clear()
    second = threading.Thread(target=lambda: answers.append(desk.answer(record, "summary", slow)))
    second.start()
    assert begun.wait(20)
    assert desk.answer(record, "summary", slow) == b"told before"  # while another is made
    go_on.set()
    second.join(30)
    assert (answers, len(made)) == ([b"told", b"told"], 2)


def test_too_many_who_wait_are_told_to_come_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_jobs, "LARGE", 0)
    monkeypatch.setattr(large_jobs, "PATIENCE", 0.1)
    job = server.submit()
    with server.app.state.gateway.large._making:
        answer = server.http.get(f"/v1/jobs/{job}/summary")
    assert problem(answer, 503)["type"].endswith("report-busy")
    assert answer.headers["retry-after"] == "10"
    assert server.http.get(f"/v1/jobs/{job}/summary").status_code == 200

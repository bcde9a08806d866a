"""What is too old or too much leaves the store, whole traces at a time, while others write and read."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pytest
from waiting import wait_until

from syncline.runtime import trace_prune
from syncline.runtime.trace_prune import keep_pruned, prune, used
from syncline.runtime.trace_store import SpanRecord, TraceStore, read_trace

DAY = 86400 * 10**9


def span(trace: int, number: int, start: int, text: str = "") -> SpanRecord:
    return SpanRecord(
        trace_id=f"{trace:032x}",
        span_id=f"{trace * 1000 + number:016x}",
        parent_id=None,
        name="token.prompted",
        service="scheduler",
        instance="scheduler",
        start_ns=start,
        end_ns=start,
        attributes={"job": "j1", "text": text},
    )


def traces(store: Path) -> list[int]:
    with sqlite3.connect(store) as db:
        return sorted({int(trace, 16) for (trace,) in db.execute("select trace_id from spans")})


def test_old_traces_leave_whole_and_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_prune, "_STEP", trace_prune._STEP.replace("limit 256", "limit 10"))
    store = TraceStore(tmp_path / "t.sqlite")
    store.write(
        span(trace, number, trace * 100 + number * 1000) for trace in range(1, 31) for number in (0, 1)
    )
    steps = []
    while left := prune(tmp_path / "t.sqlite", 2050, 0):
        steps.append(left)
    # traces 1 to 20 began before 2050, whatever their last span's time
    assert traces(tmp_path / "t.sqlite") == list(range(21, 31))
    assert sum(steps) == 40
    assert len(steps) >= 2
    assert len(read_trace(tmp_path / "t.sqlite", f"{21:032x}")) == 2
    store.close()


def test_beyond_its_size_the_oldest_leave_and_their_room_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    store = TraceStore(path)
    most = 1 << 20
    for batch in range(6):
        store.write(span(batch * 900 + n, 0, batch * 900 + n, "x" * 300) for n in range(1, 901))
        while prune(path, 0, most):
            pass
        with sqlite3.connect(path) as db:
            assert used(db) <= most
    kept = traces(path)
    assert kept == list(range(kept[0], 5401))  # the newest, without a gap
    assert len(kept) >= 500
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("pragma wal_checkpoint(truncate)")
    assert path.stat().st_size < 2 * most


def test_what_is_within_bounds_stays(tmp_path: Path) -> None:
    assert prune(tmp_path / "none.sqlite", 10**18, 1) == 0
    assert not (tmp_path / "none.sqlite").exists()
    (tmp_path / "empty.sqlite").touch()
    assert prune(tmp_path / "empty.sqlite", 10**18, 1) == 0
    store = TraceStore(tmp_path / "t.sqlite")
    store.write([span(1, 0, 100)])
    assert prune(tmp_path / "t.sqlite", 100, 0) == 0
    assert prune(tmp_path / "t.sqlite", 0, 1 << 30) == 0
    assert traces(tmp_path / "t.sqlite") == [1]
    store.close()


def test_it_prunes_while_spans_come_and_stops_when_told(tmp_path: Path) -> None:
    path, stopping, now = tmp_path / "t.sqlite", threading.Event(), time.time_ns()
    store = TraceStore(path)
    store.write(span(trace, 0, now - 40 * DAY) for trace in range(1, 2001))
    thread = threading.Thread(target=keep_pruned, args=(path, 30.0, 0, stopping))
    thread.start()
    try:
        for trace in range(5000, 5050):
            store.write([span(trace, 0, now)])
        wait_until(lambda: traces(path) == list(range(5000, 5050)), 30, "the old traces have left")
    finally:
        stopping.set()
        thread.join(10)
    assert not thread.is_alive()
    store.close()


def test_without_bounds_nothing_is_looked_at(tmp_path: Path) -> None:
    keep_pruned(tmp_path / "t.sqlite", 0, 0, threading.Event())  # returns


def test_a_store_that_cannot_be_written_is_told_and_costs_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.sqlite").write_bytes(b"this is no database, but a text that is long enough" * 10)
    stopping = threading.Event()
    thread = threading.Thread(target=keep_pruned, args=(tmp_path / "t.sqlite", 1.0, 0, stopping))
    thread.start()
    try:
        wait_until(lambda: "not pruned for now" in caplog.text, 10, "the warning")
        assert thread.is_alive()
    finally:
        stopping.set()
        thread.join(10)

"""Spans of one trajectory are found without a look at the others of its job, of which there may be a million."""

from __future__ import annotations

import time
from pathlib import Path

from syncline.runtime.trace_store import SpanRecord, TraceStore, spans_of

MANY = 40_000


def span(number: int, **attributes: str) -> SpanRecord:
    return SpanRecord(
        trace_id=f"{number:032x}",
        span_id=f"{number:016x}",
        parent_id=None,
        name="token.sampled",
        service="rollout",
        instance="w0",
        start_ns=number,
        end_ns=number + 1,
        attributes=dict(attributes),
    )


def seconds(store: Path, number: int) -> float:
    """CPU of one question."""
    began = time.process_time()
    found = spans_of(store, trajectory=f"j1-{number}-0", job="j1")
    took = time.process_time() - began
    assert [one.start_ns for one in found] == [number]
    return took


def test_a_trajectory_of_a_large_job_costs_what_one_of_a_small_job_costs(tmp_path: Path) -> None:
    """Were a large job gone through, it would take some thousand times as long."""
    took = {}
    for count in (20, MANY):
        store = tmp_path / f"{count}.sqlite"
        opened = TraceStore(store)
        opened.write(span(i, job="j1", trajectory=f"j1-{i}-0") for i in range(1, count + 1))
        opened.close()
        took[count] = min(seconds(store, 7) for _ in range(7))
    assert took[MANY] < 5 * took[20]


def test_another_jobs_spans_are_not_told(tmp_path: Path) -> None:
    opened = TraceStore(tmp_path / "s.sqlite")
    opened.write([span(1, job="j1", trajectory="j1-7-0"), span(2, job="j2", trajectory="j1-7-0")])
    opened.close()
    assert [one.start_ns for one in spans_of(tmp_path / "s.sqlite", trajectory="j1-7-0", job="j1")] == [1]

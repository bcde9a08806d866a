"""What people see while a job runs, and of a token's path: text from answers of the API."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from syncline.contract.events import WorkerStatus
from syncline.contract.version_path import VersionId
from syncline.gateway import examples
from syncline.gateway.answers import plain
from syncline.gateway.reports import _EXAMPLE as SUMMARY
from syncline.scheduler.cli_paths import report_lines, token_tree, trajectory_tree
from syncline.scheduler.snapshot import Snapshot, full_line, last_served, line, panel, sparkline, update_rate


def drawn(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=240, highlight=False, markup=False)
    console.print(renderable)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


MADE = {
    "epoch": 0,
    "tokens": 2469,
    "at": 100.0,
    "reward": 0.5,
    "lag_mean": 0.4,
    "lag_max": 1,
    "seconds": 0.2,
    "gap_mean": 1e-3,
}
WORKER = WorkerStatus(
    worker="w0",
    incarnation="abc",
    state="serving",
    version=VersionId(0, 11),
    digest="d" * 64,
    staged=VersionId(0, 12),
    running=3,
    waiting=0,
    tokens=1000,
    tokens_per_second=77.0,
    device="cpu",
    resident=1,
    why="",
    at=0.0,
)


def snapshot(**job: Any) -> Snapshot:
    return Snapshot(
        job={**plain(examples.JOB), **job},
        metrics=[{**MADE, "at": 98.0}, MADE],
        workers=plain([WORKER]),
    )


def test_a_line_says_all_that_a_glance_needs() -> None:
    s = snapshot()
    text = full_line(s)
    for part in ("running", "update 12/50", "reward", "lag", "1,234 tokens/s", "colocated/train"):
        assert part in text
    for worker in s.workers:
        assert f"{worker['worker']}={worker['version']}" in text


def updates(*ats: float, tokens: int = 100, epoch: int = 0) -> list[dict[str, Any]]:
    return [{**MADE, "at": at, "tokens": tokens, "epoch": epoch} for at in ats]


def test_before_the_first_update_the_rate_is_the_workers_own() -> None:
    s = snapshot()
    for made in ([], [MADE]):  # how long the first took is not recorded
        assert "77 tokens/s" in full_line(Snapshot(job=s.job, metrics=made, workers=s.workers))


def test_the_rate_is_of_the_updates_of_the_last_ten_seconds() -> None:
    assert update_rate(updates(*range(100, 140)), 139.2) == pytest.approx(100.0)
    slow_then_fast = updates(100.0, 150.0) + updates(*range(151, 170), tokens=300)
    assert update_rate(slow_then_fast, 169.0) == pytest.approx(300.0)
    assert update_rate(updates(100.0, 130.0, 160.0), 175.0) == pytest.approx(100 / 30)


def test_the_rate_sinks_when_updates_stop_and_counts_no_time_in_which_nothing_ran() -> None:
    steady = updates(*range(100, 120))
    assert update_rate(steady, 119.0 + 9.0) == pytest.approx(100.0)
    assert update_rate(steady, 119.0 + 40.0) == pytest.approx(1000 / 40)
    again = steady + updates(4000.0, epoch=1)
    assert update_rate(again, 4000.0) is None
    assert update_rate(again + updates(4002.0, epoch=1), 4002.0) == pytest.approx(50.0)


def path(active: float | None, left: float | None = None) -> dict[str, Any]:
    return {"active": active, "left": left}


def test_the_last_version_served_is_the_one_that_became_active_last() -> None:
    records = [
        {"version": "0.1", "workers": {"w0": path(10.0, 20.0), "w1": path(11.0)}},
        {"version": "0.2", "workers": {"w0": path(20.0), "w1": path(None)}},
        {"version": "0.3", "workers": {"w2": path(None)}},
    ]
    assert last_served(records) == {"w0": "0.2", "w1": "0.1"}
    assert last_served(plain([examples.VERSION.record])) == {"w0": "0.12"}


def test_a_worker_asleep_shows_what_it_served_last_and_one_that_never_served_a_dash() -> None:
    s = snapshot()
    asleep = {**s.workers[0], "version": None, "state": "asleep"}
    fresh = {**asleep, "worker": "w1", "state": "empty"}
    told = Snapshot(job=s.job, metrics=s.metrics, workers=[asleep, fresh], served={"w0": "0.55"})
    assert full_line(told).endswith("w0=0.55 (asleep)  w1=-  " + waiting(told)), full_line(told)
    rows = [row for row in drawn(panel(told)).splitlines() if " w0 " in row]
    assert any("asleep" in row and "0.55" in row for row in rows), rows


def waiting(s: Snapshot) -> str:
    return "  ".join(f"waits: {wait['owner']} for {wait['name']}" for wait in s.job["waits"])


def test_news_is_what_changed_and_not_each_figure() -> None:
    assert line(snapshot()) == line(snapshot(reward=0.9))
    assert line(snapshot()) != line(snapshot(update=13))
    assert line(snapshot()) != line(snapshot(mode="disjoint"))
    assert line(snapshot()) != line(snapshot(alarm="update 4: mismatch: mean 1 against a baseline of 0.1"))


def test_an_alarm_is_seen_at_a_glance_and_in_the_panel() -> None:
    s = snapshot(alarm="update 4: mismatch: mean 1 against a baseline of 0.1")
    assert "ALARM update 4: mismatch: mean 1" in full_line(s)
    assert "alarm: update 4: mismatch: mean 1" in drawn(panel(s))
    assert "larm" not in full_line(snapshot()) + drawn(panel(snapshot()))


def test_a_job_that_redis_forgot_is_not_watched_for_ever() -> None:
    assert not snapshot().ended
    assert snapshot(state="failed").ended
    forgotten = snapshot(state="unrecorded", recorded=False, reason="Redis no longer knows this job")
    assert forgotten.ended
    assert "Redis no longer knows this job" in full_line(forgotten)


def test_the_panel_shows_workers_and_waits() -> None:
    text = drawn(panel(snapshot(reason="because")))
    for part in ("1,234 tokens/s", "12 of 50 updates", "w0", "0.11", "0.12", "because"):
        assert part in text
    assert any(row.startswith("│ reward ") for row in text.splitlines()), text


def test_a_job_without_anything_yet_is_shown() -> None:
    nothing = Snapshot(
        job={**plain(examples.JOB), "mode": None, "phase": None, "waits": []}, metrics=[], workers=[]
    )
    assert "update 12/50" in full_line(nothing)
    assert "0 tokens/s" in drawn(panel(nothing))


def test_the_report_says_why_a_job_ended_as_it_did() -> None:
    made = plain(SUMMARY)
    failed = report_lines("j1", {**made, "state": "failed"}, "worker w0 ended 3 times")
    assert failed[:2] == ["job j1 failed after 50 updates", "  reason        worker w0 ended 3 times"]
    assert not any("reason" in told for told in report_lines("j1", made, ""))


@pytest.mark.parametrize(
    ("values", "wanted"), [([], ""), ([0.0], "▁"), ([1.0], "█"), ([0.0, 1.0], "▁█"), ([-1.0, 1.0], "▁█")]
)
def test_sparkline(values: list[float], wanted: str) -> None:
    assert sparkline(values) == wanted


def test_sparkline_is_never_wider_than_asked() -> None:
    assert len(sparkline([0.5] * 1001, width=40)) <= 40


def test_a_tokens_path_names_every_hop_with_its_facts() -> None:
    token = plain(examples.TOKEN)
    text = drawn(token_tree(token))
    span, version = token["span"], token["version"]
    for part in (token["trajectory"], span["version"], span["digest"][:12], span["worker"]):
        assert part in text
    for hop in [*token["hops"], *version["path"]]:
        assert hop["hop"] in text
    for name in token["missing"]:
        assert name in text
    assert f"[{span['start']}, {span['end']})" in text


def test_a_trajectorys_path_names_every_span() -> None:
    trajectory = plain(examples.TRAJECTORY)
    text = drawn(trajectory_tree(trajectory))
    for span in trajectory["spans"]:
        assert f"[{span['start']}, {span['end']})" in text
    for hop in trajectory["hops"]:
        assert hop["hop"] in text

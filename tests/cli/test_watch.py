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
from syncline.scheduler.cli_paths import token_tree, trajectory_tree
from syncline.scheduler.watch import Snapshot, full_line, line, panel, sparkline


def drawn(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=240, highlight=False, markup=False)
    console.print(renderable)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


MADE = {
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
    tokens_per_second=1234.5,
    device="cpu",
    resident=1,
    why="",
    at=0.0,
)


def snapshot(**job: Any) -> Snapshot:
    return Snapshot(
        job={**plain(examples.JOB), **job},
        metrics=[MADE],
        workers=plain([WORKER]),
    )


def test_a_line_says_all_that_a_glance_needs() -> None:
    s = snapshot()
    text = full_line(s)
    for part in ("running", "update 12/50", "reward", "lag", "1,234 tokens/s", "colocated/train"):
        assert part in text
    for worker in s.workers:
        assert f"{worker['worker']}={worker['version']}" in text


def test_news_is_what_changed_and_not_each_figure() -> None:
    assert line(snapshot()) == line(snapshot(reward=0.9))
    assert line(snapshot()) != line(snapshot(update=13))
    assert line(snapshot()) != line(snapshot(mode="disjoint"))


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

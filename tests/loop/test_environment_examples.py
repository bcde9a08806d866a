"""The examples of environments that are others' libraries and servers, in short form, as a user starts them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from environments.environment_servers import guessing
from guarantees import segment_files
from stack import ROOT, Stack

from syncline.runtime import segments
from syncline.runtime.segments import SegmentRow

SIZES = {
    "composite": {"groups": 10, "group_size": 4},
    "verifiers": {"groups": 5, "group_size": 4},
    "http": {"groups": 4, "group_size": 4},
}


@pytest.fixture
def stack() -> Iterator[Stack]:
    """One that can import the examples' tasksets."""
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    path = f"{ROOT / 'examples' / 'tasksets'}:{os.environ.get('PYTHONPATH', '')}"
    started = Stack(runs, {"PYTHONPATH": path})
    try:
        started.up()
        yield started
    finally:
        started.down()
        shutil.rmtree(runs, ignore_errors=True)


def example(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "examples" / f"{name}.toml").read_text())


def short(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    spec["schedule"]["updates"] = spec["checkpoint"]["every"] = 3
    spec["batch"] = SIZES[name]
    spec["rollout"]["workers"] = 1
    return spec


def rows_of(stack: Stack, job: str) -> list[SegmentRow]:
    assert stack.wait(job, 240)["state"] == "succeeded"
    files = segment_files(stack.runs / job)
    assert len(files) == 3
    rows = [row for file in files for row in segments.read(file).rows]
    assert all(row.reward is not None and row.reward.state == "scored" for row in rows)
    return rows


def judge(row: SegmentRow) -> str:
    assert row.reward is not None
    return row.reward.judge


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_composite_a_taskset_and_a_server_are_trained_on(stack: Stack) -> None:
    """All at once: a job waits for its own processes most of the time."""
    with guessing() as url:
        jobs = {"composite": stack.submit(short("composite", example("composite")))}
        if importlib.util.find_spec("verifiers") is not None:  # an extra, part of `dev`
            jobs["verifiers"] = stack.submit(short("verifiers", example("verifiers")))
        server = example("composite") | {
            "name": "guess",
            "task": {"environment": "http", "options": {"url": f"{url}/game", "multi_turn": True}},
            "turns": {"most": 2, "max_tokens": [1], "on_length": "go_on"},
        }
        jobs["http"] = stack.submit(short("http", server))
        rows = {name: rows_of(stack, job) for name, job in jobs.items()}
    [named] = {judge(row) for row in rows["composite"]}
    assert all(name in named for name in ("gcd", "count_bits", "letter_counting"))
    assert any(row.reward and row.reward.value for row in rows["composite"]), "nobody has guessed one"
    if "verifiers" in rows:
        assert all(judge(row).endswith(" digit_strings") for row in rows["verifiers"])
        assert any(row.reward and row.reward.value for row in rows["verifiers"])
    assert all(judge(row) == f"http {url}/game unknown" for row in rows["http"])
    told = [row.trajectory for row in rows["http"] if len(row.trajectory.turns) == 2]
    assert told, "the server was never asked for a step"
    assert {t.turns[0].observed[0].content for t in told} == {"no"}

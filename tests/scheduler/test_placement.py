"""Which processes a job has."""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.contract.job import JobSpec
from syncline.scheduler.machine import begin
from syncline.scheduler.placement import COMMANDS, place
from syncline.scheduler.stages import End

SPEC = JobSpec.model_validate({"name": "n", "model": {"name": "m"}, "rollout": {"workers": 3}})


def test_a_job_has_its_workers_a_trainer_and_sync() -> None:
    state, _ = begin(4, ("w0", "w1", "w2"), "colocated")
    placement = place("j1", SPEC, state, {"SYNCLINE_RUNS": "/r"}, Path("/r/j1"), COMMANDS)
    by_name = {process.name: process for process in placement.processes}
    assert list(by_name) == ["j1/w0", "j1/w1", "j1/w2", "j1/trainer", "j1/sync"]
    worker = by_name["j1/w1"]
    assert worker.argv[1:] == ("-m", "syncline.rollout")
    assert worker.log == Path("/r/j1/logs/w1.log")
    assert worker.env == {
        "SYNCLINE_RUNS": "/r",
        "SYNCLINE_JOB": "j1",
        "SYNCLINE_PORT": "0",
        "SYNCLINE_WORKER": "w1",
    }
    assert "SYNCLINE_WORKER" not in by_name["j1/trainer"].env


def test_phases_change_nothing_and_the_end_ends_all() -> None:
    state, _ = begin(4, ("w0",), "colocated")
    first = place("j1", SPEC, state, {}, Path("/r/j1"), COMMANDS)
    asleep = msgspec.structs.replace(state, stage="paused", paused=True)
    assert place("j1", SPEC, asleep, {}, Path("/r/j1"), COMMANDS) == first
    over = msgspec.structs.replace(state, stage="done", result=End(state="failed", reason="x"))
    assert place("j1", SPEC, over, {}, Path("/r/j1"), COMMANDS).processes == ()

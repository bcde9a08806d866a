"""Workers that come and leave: what is told to the machine of what is real, and which processes there are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from syncline.contract import events as e
from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems
from syncline.contract.version_path import VersionId
from syncline.scheduler import pool
from syncline.scheduler.launch.launcher import Observed, ProcessView
from syncline.scheduler.machine import Order, begin, fold, step
from syncline.scheduler.placement import COMMANDS, place
from syncline.scheduler.saved import Size, Watch
from syncline.scheduler.stages import State, kept, leaving

SPEC = JobSpec.model_validate(
    {
        "name": "n",
        "model": {"name": "m"},
        "schedule": {"mode": "disjoint"},
        "rollout": {"workers": 3, "workers_least": 2, "workers_most": 4},
    }
)
START, WAIT = SPEC.limits.worker_start, SPEC.limits.batch_wait


def flowing(workers: int = 3) -> State:
    state, _ = begin(9, tuple(f"w{i}" for i in range(workers)), "disjoint")
    version = VersionId(0, 0)
    return fold(state, [e.Minted(version=version), e.Active(version=version, workers=("w0",))])


def scaled(state: State, workers: int) -> State:
    return step(state, e.ScaleTo(workers=workers, why="request"))[0]


def names(state: State) -> list[str]:
    wanted = place("j1", SPEC, state, {}, Path("/r/j1"), COMMANDS)
    return [process.name.removeprefix("j1/") for process in wanted.processes if process.role == "rollout"]


def seen(*workers: str) -> Observed:
    view = ProcessView(name="", state="stopping", pid=1, exit=None, starts=1, restarts=0, since=1.0)
    return Observed(processes={f"j1/{name}": view for name in (*workers, "trainer", "sync")})


def test_the_order_says_how_many_there_are_and_the_highest_end_first() -> None:
    state = flowing()
    state, commands = step(state, e.ScaleTo(workers=1, why="request"))
    (order,) = commands
    assert isinstance(order, Order)
    assert (order.seq, order.workers, order.phase) == (state.seq, 1, "flow")
    assert names(state) == ["w0", "w1", "w2"]
    state, _ = step(state, e.Emptied(who="w1", seq=state.seq))
    assert names(state) == ["w0", "w1", "w2"], "a pool of pods has no gaps"
    state, _ = step(state, e.Emptied(who="w2", seq=state.seq))
    assert names(state) == ["w0"]
    assert leaving(state) == ("w1", "w2")
    assert pool.left("j1", state, seen("w0", "w2")) == [e.WorkerLeft(who="w1", seq=state.seq)]
    state = fold(state, pool.left("j1", state, seen("w0")))
    assert set(state.engines) == {"w0", "trainer"}


def test_one_that_is_wanted_again_stays_and_what_it_said_before_counts_no_more() -> None:
    state = scaled(flowing(), 2)
    told = e.Emptied(who="w2", seq=state.seq)
    state = scaled(fold(state, [told]), 3)
    assert names(state) == ["w0", "w1", "w2"]
    state = fold(scaled(state, 2), [told])
    assert kept(state) == 3, "it may hold something since"


def test_nobody_leaves_whose_process_is_there() -> None:
    state = scaled(flowing(), 2)
    assert pool.left("j1", state, seen("w0", "w1")) == [], "it has not said that it holds nothing"
    state = fold(state, [e.WorkerLeft(who="w2", seq=state.seq), e.WorkerLeft(who="w0", seq=state.seq)])
    assert set(state.engines) == {"w0", "w1", "w2", "trainer"}


def test_who_does_not_come_is_given_up_as_long_as_the_least_are_left() -> None:
    state = scaled(flowing(), 4)
    watch = Watch(awaited={"w3": 10.0})
    assert pool.overdue(SPEC, state, watch, 10.0 + START - 1) == []
    assert pool.overdue(SPEC, state, watch, 10.0 + START + 1) == [e.ScaleTo(workers=3, why="late")]
    both = Watch(awaited={"w2": 10.0, "w3": 10.0})
    assert pool.overdue(SPEC, state, both, 11.0 + START) == [e.ScaleTo(workers=2, why="late")]
    assert pool.overdue(SPEC, state, Watch(awaited={"w1": 10.0}), 11.0 + START) == []
    assert not pool.may_be_given_up(SPEC, state, "w1"), "the job fails without it"
    assert not pool.may_be_given_up(SPEC, state, "trainer")
    assert not pool.may_be_given_up(SPEC, msgspec.structs.replace(state, mode="colocated"), "w3")


def test_who_does_not_come_to_an_end_is_ended() -> None:
    state = scaled(flowing(), 2)
    watch = Watch(resized=10.0)
    assert pool.overdue(SPEC, state, watch, 10.0 + WAIT - 1) == []
    assert pool.overdue(SPEC, state, watch, 10.0 + WAIT + 1) == [e.Emptied(who="w2", seq=state.seq)]
    gone = Watch(resized=10.0, awaited={"w2": 11.0})
    assert pool.overdue(SPEC, state, gone, 12.0 + START) == [e.Emptied(who="w2", seq=state.seq)]


def test_what_is_remembered_of_a_change() -> None:
    watch = Watch(up={"w0": 1.0, "w1": 1.0, "w2": 1.0})
    state = scaled(flowing(), 4)
    pool.note(e.ScaleTo(workers=4, why="policy"), state, watch, 50.0)
    assert (watch.awaited, watch.sizes) == ({"w3": 50.0}, [Size(update=0, workers=4)])
    told = pool.told(SPEC, state, watch, "")
    assert (told.workers, told.least, told.most, told.coming, told.why) == (4, 2, 4, ("w3",), "policy")
    state = scaled(state, 3)
    pool.note(e.ScaleTo(workers=3, why="request"), state, watch, 60.0)
    assert pool.told(SPEC, state, watch, "").leaving == ("w3",)
    assert pool.told(SPEC, state, watch, "a gang").fixed == "a gang"
    colocated = msgspec.structs.replace(state, mode="colocated")
    pool.note(e.ScaleTo(workers=4, why="request"), colocated, watch, 70.0)
    assert watch.sizes[-1].workers == 3, "a request that the machine did not take is no change"


@pytest.mark.parametrize(
    ("rollout", "schedule", "path"),
    [
        ({"workers": 2, "workers_least": 3}, {}, "rollout.workers_least"),
        ({"workers": 3, "workers_most": 2}, {}, "rollout.workers_most"),
        ({"workers": 1, "workers_most": 2}, {"max_lag": 0}, "rollout.workers_most"),
        ({"workers": 2, "workers_least": 1}, {"max_lag": 0}, "rollout.workers_least"),
        ({"workers": 1, "workers_most": 2, "pace": (1.0,)}, {}, "rollout.pace"),
    ],
)
def test_bounds_that_cannot_be_are_refused(
    rollout: dict[str, object], schedule: dict[str, object], path: str
) -> None:
    spec = JobSpec.model_validate(
        {"name": "n", "model": {"name": "m"}, "rollout": rollout, "schedule": schedule}
    )
    found = [problem for problem in problems(spec) if problem.path == path]
    assert found, problems(spec)
    assert all(problem.hint for problem in found)


def test_a_job_that_says_nothing_has_a_pool_that_stays() -> None:
    spec = JobSpec.model_validate({"name": "n", "model": {"name": "m"}})
    assert (spec.rollout.least, spec.rollout.most, spec.rollout.scales) == (2, 2, False)
    assert problems(spec) == []

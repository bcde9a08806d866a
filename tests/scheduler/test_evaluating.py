"""The machine of an evaluation: one version, no trainer, and nothing that can circle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.contract import events as e
from syncline.contract.version_path import VersionId
from syncline.scheduler import evaluating
from syncline.scheduler.machine import Order
from syncline.scheduler.stages import End, State

PINNED, OTHER = VersionId(1, 12), VersionId(1, 13)
EVENTS: list[e.Event] = [
    e.Active(version=PINNED, workers=("w0",)),
    e.Active(version=OTHER, workers=("w0",)),
    e.Minted(version=OTHER),
    e.SwitchTo(mode="disjoint", why="request"),
    e.Pause(),
    e.Resume(),
    e.WorkerLost(who="w0", exit=-9),
    e.SyncFailed(version=PINNED, reason="no tensor"),
    e.Failed(who="scheduler", reason="late"),
    e.Cancel(),
    e.Finished(updates=0),
]


def begun() -> State:
    state, commands = evaluating.begin(PINNED, ("w0", "w1"))
    (order,) = commands
    assert isinstance(order, Order)
    assert (order.rollout, order.trainer, order.gate, order.seq) == ("awake", "asleep", "shut", 1)
    return state


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_no_order_of_events_opens_the_gate_for_another_version_or_wakes_a_trainer(log: list[e.Event]) -> None:
    state = begun()
    for event in log:
        before, (state, commands) = state, evaluating.step(state, event)
        orders = [command for command in commands if isinstance(command, Order)]
        assert [order.seq for order in orders] == list(range(before.seq + 1, state.seq + 1))
        assert (before.stage != state.stage) == bool(orders)
        for order in orders:
            assert order.trainer == "asleep"
            assert order.gate == "shut" or (state.active == PINNED and not state.paused)
            assert order.rollout == "awake" or state.stage == "done"
        assert (state.stage == "done") == (state.result is not None)
        assert before.stage != "done" or state == before
        assert state.active in (None, PINNED)
        assert state.minted == PINNED


def test_the_story_of_an_evaluation() -> None:
    state = begun()
    stages = []
    for event in (EVENTS[1], EVENTS[0], e.Pause(), e.Resume(), e.Finished(updates=0)):
        state, _ = evaluating.step(state, event)
        stages.append(state.stage)
    assert stages == ["sync", "sample", "paused", "sample", "done"]
    assert state.result == End(state="succeeded", reason="")


def test_a_version_that_cannot_be_brought_to_the_workers_ends_it_with_the_reason() -> None:
    _, commands = evaluating.step(begun(), e.SyncFailed(version=PINNED, reason="tensor lm_head is gone"))
    assert commands[-1] == End(state="failed", reason="version 1.12: tensor lm_head is gone")
    late, _ = evaluating.step(begun(), EVENTS[0])
    late, _ = evaluating.step(late, e.SyncFailed(version=PINNED, reason="a worker that joined late"))
    assert late.stage == "sample"

"""The machine of a job that evaluates: `step(state, event) -> (state, commands)`. Pure, like `machine.py`.

    begin -> SYNC -Active-> SAMPLE -Finished-> done
                              |  ^
                      Pause   v  | Resume
                             PAUSED

There is no trainer and one version, so nothing alternates and nothing drains: rollout is awake from the first order to
the end, and the gate is open in SAMPLE alone. A pause shuts the gate and leaves engines awake, since what was begun
goes on to its end. A worker that is replaced joins under sync, with the gate as it is.

The state is the training machine's, of which `minted` is the pinned version; what belongs to a trainer stays unused.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from syncline.contract import events as e
from syncline.contract.version_path import VersionId
from syncline.scheduler.machine import Command, Order
from syncline.scheduler.stages import STANCES, End, Engine, Stage, Stance, State, fleet

ORDERED: Mapping[Stage, Stance] = {
    "sync": STANCES["sync"],
    "sample": STANCES["sample"],
    "paused": Stance("paused", rollout="awake", trainer="asleep", gate="shut"),
    "done": STANCES["done"],
}


def begin(version: VersionId, workers: tuple[str, ...]) -> tuple[State, tuple[Command, ...]]:
    """A job's first state and order: workers wake and are brought to `version`."""
    engines = fleet((name, Engine()) for name in workers)
    state = State(
        updates=0, engines=engines, mode="colocated", wanted="colocated", stage="sync", minted=version
    )
    return state, (_order(state),)


def step(state: State, event: e.Event) -> tuple[State, tuple[Command, ...]]:
    """The state after `event`, and what to do. An event that is late, repeated or foreign changes nothing."""
    if state.stage == "done":
        return state, ()
    state = _absorb(state, event)
    stage = _stage(state)
    if stage == state.stage:
        return state, ()
    state = replace(state, stage=stage, seq=state.seq + 1, gate_since=state.seq + 1)
    if state.result is not None:
        return state, (_order(state), state.result)
    return state, (_order(state),)


def _stage(state: State) -> Stage:
    if state.result is not None:
        return "done"
    if state.active is None:
        return "sync"
    return "paused" if state.paused else "sample"


def _absorb(state: State, event: e.Event) -> State:
    match event:
        case e.Active(version=version) if version == state.minted:
            return replace(state, active=version)
        case e.Pause():
            return replace(state, paused=True)
        case e.Resume():
            return replace(state, paused=False)
        case e.Finished():
            return replace(state, finished=True, result=End(state="succeeded", reason=""))
        case e.Cancel():
            return replace(state, result=End(state="cancelled", reason="cancelled"))
        case e.Failed(who=who, reason=reason):
            return replace(state, result=End(state="failed", reason=f"{who}: {reason}"))
        case e.SyncFailed(version=version, reason=reason) if state.active is None:
            return replace(state, result=End(state="failed", reason=f"version {version}: {reason}"))
    return state


def _order(state: State) -> Order:
    update = 0 if state.minted is None else state.minted.number
    return Order(seq=state.seq, mode=state.mode, update=update, **ORDERED[state.stage]._asdict())

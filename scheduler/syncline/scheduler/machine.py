"""The machine that alternates and overlaps the engines of one job: `step(state, event) -> (state, commands)`.

Pure: no clock, no I/O, no randomness. The service folds the job's events through it and performs the
commands; folding the same events again gives the same state, which is how a killed scheduler resumes.

    begin -> TRAIN -Minted-> YIELD -trainer Slept-> (hub)           colocated: one side awake at a time
                                                      | version waits
                        (hub) <-Active newest- SYNC <-+
                                                      | nothing to train on
             DRAIN <-BatchReady | leaving- SAMPLE <---+
               | Drained, trainer Slept               | batch
               +-> (hub)     TRAIN <-all Slept- CLEAR <+

    begin -> TRAIN -Minted-> JOIN -Active newest-> FLOW             disjoint: both sides awake
                                  (hub) -------->  FLOW
             DRAIN <----------- leaving -----------+                leaving: another mode or a pause is wanted
               | Drained, trainer Slept
               +-> (hub) -> the other mode, PAUSED, or on

Theory of operation. A stage fixes what is ordered of both sides (`STANCES` in `stages.py`); a table of
rows says which facts lead from one stage to which other (`ROWS`). Events only change facts. After each event
the rows are tried until none fits, so a fact that comes early waits for its stage, and one that comes twice
changes nothing. The hub is the one door: a point with nothing in flight, where the wanted mode takes effect
and the next stage is chosen (`HUB`). Every way out of `SAMPLE` and `FLOW` leads through `DRAIN` to the hub,
which is why no work is lost.

Acknowledgements are trusted by order number. An engine counts as asleep when it has acknowledged an order not
older than the first of the unbroken run of orders to sleep. That holds through losses: a process obeys the newest
order that it finds when it starts, so whatever replaces one that acknowledged finds an order to sleep, and one
that was there before the order must acknowledge it itself. For the same reason the very first order needs no
acknowledgement. What is seen in the ledger counts for the order under which it was seen, and `Drained` is seen
only once every worker has acknowledged the shut gate: one that has not heard of it may still begin a request.

The pool. Workers are numbered, and `pool` says how many are wanted. A change of it is an order of the same stage: a
worker whose number is not below it begins nothing and ends what it holds. It stays among those whose acknowledgements
count until its process has ended, since until then it may act on an old order; so one that leaves, or comes, in the
middle of anything is as one that is replaced. A worker that comes has acknowledged nothing. Only a disjoint job's pool
changes, and one that is switched keeps it.

Liveness. Each stage with a shut gate waits for someone who must answer or be replaced: TRAIN for the trainer
(Minted) or the ledger (BatchShort), YIELD and CLEAR for engines that were told to sleep, SYNC and JOIN for
the sync service (Active, or SyncFailed ends the job), DRAIN for requests that end by themselves, PAUSED for
the user. A switch ends because each of these does, and the hub then takes the mode. Deadlines are the
service's: it turns an answer that never comes into `Failed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from syncline.contract import events as e
from syncline.contract.version_path import VersionId
from syncline.scheduler.stages import (
    FACTS,
    HUB,
    ROWS,
    STANCES,
    TRAINER,
    End,
    Engine,
    Stage,
    State,
    acknowledged,
    counted,
    fleet,
    kept,
    leaving,
    number,
    worker,
)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Command: write this phase. The service adds the time."""

    seq: int
    mode: e.Mode
    phase: e.PhaseName
    rollout: Literal["awake", "asleep"]
    trainer: Literal["awake", "asleep"]
    gate: Literal["open", "shut"]
    update: int
    workers: int = 0


class Allow(msgspec.Struct, frozen=True, kw_only=True):
    """Command: work may be submitted from now on, or may not."""

    submit: bool


Command = Order | Allow | End


class Circling(Exception):
    """The table leads round in a circle without an event. The message tells the stages passed."""


def begin(updates: int, workers: tuple[str, ...], mode: e.Mode) -> tuple[State, tuple[Command, ...]]:
    """A job's first state and orders: the trainer wakes and mints version 0 while rollout sleeps."""
    engines = fleet((name, Engine(slept=1)) for name in (*workers, TRAINER))
    state = counted(State(updates=updates, engines=engines, mode=mode, wanted=mode, pool=len(workers)))
    return state, (_order(state), Allow(submit=False))


def step(state: State, event: e.Event) -> tuple[State, tuple[Command, ...]]:
    """The state after `event`, and what to do. An event that is late, repeated or foreign changes nothing."""
    if state.stage == "done":
        return state, ()
    before, state = state, _absorb(state, event)
    commands: list[Command] = []
    if state.pool != before.pool:
        seq = state.seq + 1
        state = msgspec.structs.replace(state, seq=seq, pool_since=seq, emptied=())
        commands.append(_order(state))
    while (stage := _next(state)) is not None:
        state = _enter(_take_mode(state) if stage == "hub" else state, stage)
        commands.append(_order(state))
        if len(commands) > len(STANCES):
            raise Circling(f"{event} leads through {', '.join(str(command) for command in commands)}")
    opened = STANCES[state.stage].gate == "open"
    if opened != (STANCES[before.stage].gate == "open"):
        commands.append(Allow(submit=opened))
    if state.result is not None:
        commands.append(state.result)
    return state, tuple(commands)


def fold(state: State, log: Iterable[e.Event]) -> State:
    """The state after all of `log`."""
    for event in log:
        state, _ = step(state, event)
    return state


def _next(state: State) -> Stage | Literal["hub"] | None:
    if state.stage == "done":
        return None
    if state.result is not None or _hold(state, ("finished", "newest active")):
        return "done"
    return next((row.to for row in ROWS if row.stage == state.stage and _hold(state, row.facts)), None)


def _hold(state: State, facts: tuple[str, ...]) -> bool:
    return all(FACTS[fact](state) for fact in facts)


def _take_mode(state: State) -> State:
    """At the hub nothing is in flight, so this is where the mode may change."""
    return msgspec.structs.replace(state, mode=state.wanted)


def _enter(state: State, to: Stage | Literal["hub"]) -> State:
    stage = next(stage for facts, stage in HUB if _hold(state, facts)) if to == "hub" else to
    old, new, seq = STANCES[state.stage], STANCES[stage], state.seq + 1
    return msgspec.structs.replace(
        state,
        stage=stage,
        seq=seq,
        rollout_since=state.rollout_since if old.rollout == new.rollout else seq,
        trainer_since=state.trainer_since if old.trainer == new.trainer else seq,
        gate_since=state.gate_since if old.gate == new.gate else seq,
        sleepers=state.sleepers if old.rollout == new.rollout else 0,  # nobody can have heard a new order yet
        hearers=state.hearers if old.gate == new.gate else 0,
        base=state.minted if stage == "train" else state.base,
        batch=state.batch and stage == "drain",
        short=False,
        drained=state.drained and new.gate == "shut",
        result=state.result if stage != "done" else state.result or End(state="succeeded", reason=""),
    )


def _order(state: State) -> Order:
    stance = STANCES[state.stage]
    update = 0 if state.minted is None else state.minted.number
    return Order(seq=state.seq, mode=state.mode, update=update, workers=state.pool, **stance._asdict())


def _absorb(state: State, event: e.Event) -> State:
    change = msgspec.structs.replace
    match event:
        case e.Slept(who=who, seq=seq) if who in state.engines and seq <= state.seq:
            return acknowledged(state, who, slept=seq)
        case e.Woke(who=who, seq=seq) if who in state.engines and seq <= state.seq:
            return acknowledged(state, who, woke=seq)
        case e.BatchReady(seq=seq):
            seen = state.stage in ("sample", "drain") and seq >= state.gate_since
            return change(state, batch=state.batch or seen)
        case e.BatchShort(seq=seq):
            seen = state.stage == "train" and seq >= state.trainer_since
            return change(state, short=state.short or seen)
        case e.Drained(seq=seq):
            seen = state.stage == "drain" and seq >= state.gate_since
            return change(state, drained=state.drained or seen)
        case e.Minted(version=version):
            return change(state, minted=_newer(state.minted, version))
        case e.Active(version=version):
            return change(state, active=_newer(state.active, version))
        case e.VersionRefused(version=version, reason=reason) if version.number >= state.updates:
            return _fail(state, f"version {version}, the last,", f"is refused: {reason}")
        case e.VersionRefused(version=version) if state.active is not None and version > state.active:
            return change(state, refused=_newer(state.refused, version))
        case e.SwitchTo(mode=mode):
            return change(state, wanted=mode)
        case e.ScaleTo(workers=workers) if workers >= 1 and state.mode == "disjoint":
            return _pool(state, workers)
        case e.Emptied(who=who, seq=seq) if seq >= state.pool_since and who in leaving(state):
            return change(state, emptied=tuple(sorted({*state.emptied, who})))
        case e.WorkerLeft(who=who, seq=seq) if seq >= state.pool_since and who in leaving(state):
            gone = number(who) >= kept(state)
            return counted(change(state, engines=state.engines.delete(who))) if gone else state
        case e.Pause():
            return change(state, paused=True)
        case e.Resume():
            return change(state, paused=False)
        case e.Finished(updates=made) if made < state.updates:
            return _fail(state, TRAINER, f"finished after {made} of {state.updates} updates")
        case e.Finished():
            return change(state, finished=True)
        case e.Cancel():
            return change(state, result=End(state="cancelled", reason="cancelled"))
        case e.Failed(who=who, reason=reason):
            return _fail(state, who, reason)
        case e.SyncFailed(version=version, reason=reason) if state.active is None or version > state.active:
            return _fail(state, f"version {version}", reason)
    return state


def _pool(state: State, workers: int) -> State:
    """So many workers are wanted. One that comes anew has acknowledged nothing: it must answer for itself."""
    names = (worker(i) for i in range(workers))
    new = {name: Engine(first=state.seq + 1) for name in names if name not in state.engines}
    return msgspec.structs.replace(state, pool=workers, engines=state.engines.update(new))


def _fail(state: State, who: str, reason: str) -> State:
    return msgspec.structs.replace(state, result=End(state="failed", reason=f"{who}: {reason}"))


def _newer(known: VersionId | None, version: VersionId) -> VersionId:
    return version if known is None or known < version else known

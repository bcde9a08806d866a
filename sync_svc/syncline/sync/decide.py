"""The activation machine: `steps(state, events, at) -> (state, effects)`. Pure; see docs/decisions/0001.

What it holds, whatever comes in whatever order: no worker is ordered to commit what it did not verify under
the outstanding order; no worker is ordered to a version below the one it serves; a barrier commits only when
every live worker in rotation has verified; rolling waits for nobody; no worker is ordered to commit a version whose
proof is wanted and not there; each version ends active, superseded, refused or failed.

An event changes the facts; then `_advance` looks at the facts alone and gives the orders that are due, so
that events lost or told twice cost time and nothing else. For the same reason what came together is told together:
the fleet is looked at once, however many answers there were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, assert_never

from msgspec.structs import replace

from syncline.contract.version_path import VersionId
from syncline.sync.answers import acked, put_out
from syncline.sync.endings import endings, proved
from syncline.sync.state import (
    Acked,
    Broken,
    Effect,
    Ended,
    Event,
    Lost,
    Minted,
    Offer,
    Order,
    Proved,
    Published,
    Reached,
    Refused,
    Seen,
    State,
    Tick,
    Wanted,
    Worker,
    idle,
    latest,
    named,
    with_offer,
    with_workers,
)


class TwoManifests(AssertionError):
    """One version came with two manifests. The store refuses that before the machine hears of it."""


Stepped = tuple[State, list[Effect]]


def step(state: State, event: Event, at: float) -> Stepped:
    """The state after `event` at monotonic second `at`, and what to do, in order."""
    return steps(state, (event,), at)


def steps(state: State, events: Iterable[Event], at: float) -> Stepped:
    """The state after `events`, which came in this order and none of which answers another's order."""
    first: list[Effect] = []
    for event in events:
        state, said = _told(state, event)
        first += said
    state, overdue = _overdue(state, at)
    state, orders = _advance(state, at)
    state, ends = endings(state, at)
    return state, [*first, *overdue, *orders, *ends]


def held(state: State) -> set[VersionId]:
    """Versions whose blobs a live worker serves or may be reading, or that are on offer."""
    used = {version for w in state.workers.values() for version in (w.active, w.on) if version is not None}
    return used | set(state.offers)


# ---- what an event says ----
def _told(state: State, event: Event) -> Stepped:
    match event:
        case Minted():
            return _minted(state, event.version)
        case Published():
            return _published(state, event)
        case Proved():
            return proved(state, event)
        case Broken():
            pending = tuple(v for v in state.pending if v != event.version)
            return replace(state, pending=pending), [
                Ended(version=event.version, how="failed", reason=event.reason)
            ]
        case Acked():
            return acked(state, event.ack)
        case Seen():
            return _seen(state, event)
        case Lost():
            return _lost(state, event.worker)
        case Wanted():
            return _wanted(state, event), []
        case Tick():
            return state, []
        case _:
            assert_never(event)


def _minted(state: State, version: VersionId) -> Stepped:
    if version == state.newest:
        return state, []
    if state.newest is not None and version < state.newest:
        reason = f"version {version} is older than {state.newest}"
        effects: list[Effect] = [Refused(reason=reason)]
        if version not in state.offers and version not in state.pending:
            effects.append(Ended(version=version, how="superseded", reason=reason))
        return replace(state, refused=state.refused + 1), effects
    reason = f"version {version} was minted before this one was published"
    gone = [Ended(version=old, how="superseded", reason=reason) for old in state.pending]
    return replace(state, newest=version, pending=(version,)), [*gone]


def _published(state: State, event: Published) -> Stepped:
    known = state.offers.get(event.version)
    if known is not None:
        if known.digest != event.digest:
            raise TwoManifests(f"version {event.version}: manifests {known.digest} and {event.digest}")
        return state, []
    top = max(state.offers, default=None)
    pending = tuple(v for v in state.pending if v != event.version)
    if top is not None and event.version < top:
        reason = f"version {event.version} is older than {top}"
        ended = Ended(version=event.version, how="superseded", reason=reason)
        return replace(state, pending=pending, refused=state.refused + 1), [Refused(reason=reason), ended]
    offer = Offer(
        version=event.version,
        digest=event.digest,
        loaded=event.loaded,
        canaries=event.canaries,
        tolerance=event.tolerance,
        scope_began=event.complete,
        ended="active" if event.complete else "",
        proof="wanted" if event.proof and not event.complete else "none",
    )
    newest = event.version if state.newest is None else max(state.newest, event.version)
    return replace(state, pending=pending, newest=newest, offers={**state.offers, offer.version: offer}), []


def _seen(state: State, event: Seen) -> Stepped:
    known = state.workers.get(event.worker)
    if known is not None and known.incarnation == event.incarnation:
        return state, []
    left = [] if known is None else _left(known)
    offer = state.offers.get(event.version) if event.version is not None else None
    honest = offer is not None and offer.digest == event.digest
    worker = Worker(
        name=event.worker,
        incarnation=event.incarnation,
        # of an older version the machine cannot check the digest; it only has to stay above it
        active=event.version if honest or offer is None else None,
        loaded=offer.loaded if honest and offer is not None else "",
    )
    return with_workers(state, [worker]), left


def _lost(state: State, name: str) -> Stepped:
    worker = state.workers.get(name)
    if worker is None:
        return state, []
    return replace(state, workers=state.workers.delete(name)), _left(worker)


def _left(worker: Worker) -> list[Effect]:
    if worker.active is None:
        return []
    return [Reached(version=worker.active, worker=worker.name, what="left")]


def _wanted(state: State, event: Wanted) -> State:
    if event.awake and not state.awake:
        # an engine that slept has dropped what it had staged: begin again, with fresh deadlines
        again = [idle(w) if w.phase in ("staging", "verified") else w for w in state.workers.values()]
        state = with_workers(state, again)
    return replace(state, scope=event.scope, awake=event.awake)


# ---- what time says ----
def _overdue(state: State, at: float) -> Stepped:
    """Put workers out of rotation whose order has run out of time."""
    if not state.awake:
        return state, []
    effects: list[Effect] = []
    late = [w for w in state.workers.values() if w.due is not None and at >= w.due and w.on is not None]
    for worker in named(late):
        what = "stage" if worker.phase == "staging" else "commit"
        why = f"no answer to the order to {what} in {state.wait / 2:g} s"
        state, out = put_out(state, worker, why, abort=True)
        effects += out
    return state, effects


# ---- what the facts ask for ----
def _advance(state: State, at: float) -> Stepped:
    offer = latest(state)
    if not state.awake:
        stopped = [replace(w, due=None) for w in state.workers.values() if w.due is not None]
        return with_workers(state, stopped), []
    if offer is None:
        return state, []
    effects: list[Effect] = []
    commit = _may_commit(state, offer)
    for version in sorted({w.on for w in commit if w.on is not None}):
        group = [w for w in commit if w.on == version]
        state, order = _order(state, "commit", state.offers[version], group, at)
        state = with_offer(state, version, scope_began=True)
        effects.append(order)
    stage = [
        w
        for w in state.workers.values()
        if (w.phase == "idle" or (w.phase == "verified" and w.on != offer.version))
        and (w.active is None or w.active < offer.version)
        and (w.out is None or w.out < offer.version)
    ]
    if stage:
        state, order = _order(state, "stage", offer, stage, at)
        effects.append(order)
    stood = [w for w in state.workers.values() if w.order >= 0 and w.due is None]
    running = [replace(w, due=at + state.wait / 2) for w in stood]
    return with_workers(state, running), effects


def _may_commit(state: State, offer: Offer) -> list[Worker]:
    """Verified workers whose turn has come.

    Rolling, or a scope that has begun: at once, also to a version that is no longer the newest, so that a
    slow worker gets ahead. Barrier: all together, once each live worker in rotation has verified the newest.
    """
    verified = [w for w in state.workers.values() if w.phase == "verified" and w.on is not None]
    if state.scope == "rolling":
        return [w for w in verified if w.on is not None and state.offers[w.on].proof != "wanted"]
    if offer.scope_began or offer.proof == "wanted":
        return [w for w in verified if w.on == offer.version and offer.proof != "wanted"]
    in_rotation = [w for w in state.workers.values() if w.out is None or w.out < offer.version]
    ready = [
        w
        for w in in_rotation
        if (w.on == offer.version and w.phase in ("verified", "committing")) or w.active == offer.version
    ]
    return [w for w in ready if w.phase == "verified"] if len(ready) == len(in_rotation) else []


def _order(
    state: State, kind: Literal["stage", "commit"], offer: Offer, workers: list[Worker], at: float
) -> tuple[State, Order]:
    seq = state.seq + 1
    ordered = [
        replace(
            w,
            phase="staging" if kind == "stage" else "committing",
            on=offer.version,
            order=seq,
            due=at + state.wait / 2,
            out=None,
            why="",
            late=-1,
        )
        for w in workers
    ]
    order = Order(
        order=kind,
        version=offer.version,
        digest=offer.digest,
        workers=tuple(sorted(w.name for w in workers)),
        seq=seq,
    )
    return replace(with_workers(state, ordered), seq=seq), order

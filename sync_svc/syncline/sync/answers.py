"""What a worker's answer changes. Part of the pure machine: `decide.py` calls it, nothing else does."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from syncline.contract.version_path import Ack
from syncline.sync.state import (
    Effect,
    Offer,
    Order,
    Reached,
    Refused,
    State,
    Worker,
    idle,
    with_workers,
)


def acked(state: State, ack: Ack) -> tuple[State, list[Effect]]:
    """The facts after `ack`. One that answers no outstanding order of that process is only counted."""
    worker = state.workers.get(ack.worker)
    if ack.kind == "joined":
        return _joined(state, worker, ack)
    if worker is None or worker.incarnation != ack.incarnation:
        return _unasked(state, ack)
    if ack.kind == "active" and ack.seq >= 0 and ack.seq == worker.late and worker.out is not None:
        return _active(state, replace(worker, on=worker.out, out=None, why="", late=-1), ack)
    if worker.on is None or ack.seq != worker.order or ack.version != worker.on:
        return _unasked(state, ack)
    offer = state.offers[worker.on]
    match ack.kind:
        case "staged" if worker.phase == "staging":
            return state, [Reached(version=offer.version, worker=worker.name, what="staged", ack=ack)]
        case "verified" if worker.phase == "staging":
            return _verified(state, worker, offer, ack)
        case "active" if worker.phase == "committing":
            return _active(state, worker, ack)
        case "failed" | "refused" | "aborted":
            return put_out(state, worker, ack.reason or f"{ack.kind} without a reason", abort=False, ack=ack)
        case "staged" | "verified" | "active":
            return _unasked(state, ack)
        case _:
            assert_never(ack.kind)


def put_out(
    state: State, worker: Worker, reason: str, *, abort: bool, ack: Ack | None = None
) -> tuple[State, list[Effect]]:
    """Take `worker` out of rotation for the version it is on, and tell it to drop that one if `abort`."""
    if worker.on is None:
        raise AssertionError(f"worker {worker.name} is put out of rotation for no version")
    late = worker.order if worker.phase == "committing" and ack is None else -1
    state = with_workers(state, [replace(idle(worker), out=worker.on, why=reason, late=late)])
    effects: list[Effect] = [
        Reached(version=worker.on, worker=worker.name, what="out", reason=reason, ack=ack)
    ]
    if abort:
        state = replace(state, seq=state.seq + 1)
        digest = state.offers[worker.on].digest
        effects.append(
            Order(order="abort", version=worker.on, digest=digest, workers=(worker.name,), seq=state.seq)
        )
    return state, effects


def _joined(state: State, known: Worker | None, ack: Ack) -> tuple[State, list[Effect]]:
    if known is not None and known.incarnation == ack.incarnation and known.phase == "verified":
        return state, []  # it waits for the others of a barrier, and asks meanwhile
    effects: list[Effect] = []
    if known is not None and known.active is not None:
        effects.append(Reached(version=known.active, worker=known.name, what="left"))
    return with_workers(state, [Worker(name=ack.worker, incarnation=ack.incarnation)]), effects


def _verified(state: State, worker: Worker, offer: Offer, ack: Ack) -> tuple[State, list[Effect]]:
    wrong = _disagreement(offer, ack)
    if wrong:
        return put_out(state, worker, wrong, abort=True, ack=ack)
    unchanged = worker.active is not None and worker.loaded == offer.loaded
    verdict = "verified, unchanged" if unchanged else "verified"
    reached = Reached(version=offer.version, worker=worker.name, what="verified", verdict=verdict, ack=ack)
    return with_workers(state, [replace(worker, phase="verified", order=-1, due=None)]), [reached]


def _disagreement(offer: Offer, ack: Ack) -> str:
    """What in a `verified` ack is not as the manifest and the contract say. Empty: it agrees."""
    if ack.digest != offer.digest:
        return f"verified manifest {ack.digest or 'none'}, expected {offer.digest}"
    if ack.loaded_digest != offer.loaded:
        return f"loaded digest {ack.loaded_digest or 'none'}, expected {offer.loaded}"
    if offer.canaries and ack.canary_gap is None:
        return "no canary gap reported"
    if ack.canary_gap is not None and not ack.canary_gap <= offer.tolerance:  # NaN is no agreement
        return f"canary gap {ack.canary_gap:g} exceeds the contract's {offer.tolerance:g}"
    return ""


def _active(state: State, worker: Worker, ack: Ack) -> tuple[State, list[Effect]]:
    if worker.on is None:
        raise AssertionError(f"worker {worker.name} became active on no version")
    effects: list[Effect] = []
    if worker.active is not None and worker.active != worker.on:
        effects.append(Reached(version=worker.active, worker=worker.name, what="left"))
    effects.append(Reached(version=worker.on, worker=worker.name, what="active", ack=ack))
    loaded = state.offers[worker.on].loaded if worker.on in state.offers else ""
    return with_workers(state, [replace(idle(worker), active=worker.on, loaded=loaded)]), effects


def _unasked(state: State, ack: Ack) -> tuple[State, list[Effect]]:
    reason = (
        f"worker {ack.worker} answers {ack.kind} of {ack.version} to order {ack.seq}, which nobody awaits"
    )
    return replace(state, refused=state.refused + 1), [Refused(reason=reason)]

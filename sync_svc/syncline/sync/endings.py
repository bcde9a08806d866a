"""How versions end: active, superseded, refused or failed. Part of the pure machine: only `decide.py` calls it.

A version is active when its commit scope is complete: in a barrier every live worker in rotation serves it,
in rolling the first one does. It is superseded when a newer one was published and nobody is on it; it has
failed when the clock of `limits.activation_wait`, which runs while some worker is ordered awake, ends before.
"""

from __future__ import annotations

from msgspec.structs import replace

from syncline.contract.version_path import VersionId
from syncline.sync.answers import put_out
from syncline.sync.state import Effect, Ended, Offer, Proved, State, latest, named, with_offer, with_workers

Stepped = tuple[State, list[Effect]]


def endings(state: State, at: float) -> Stepped:
    effects: list[Effect] = []
    for offer in sorted(state.offers.values(), key=lambda o: o.version):
        state, ended = _ending(state, offer, at)
        effects += ended
    return _forget(state), effects


def _ending(state: State, offer: Offer, at: float) -> Stepped:
    if offer.ended:
        return state, []
    version = offer.version
    serving = tuple(sorted(w.name for w in state.workers.values() if w.active == version))
    underway = [w for w in state.workers.values() if w.on == version and w.phase != "idle"]
    newer = max(state.offers) > version
    if serving and (state.scope == "rolling" or newer or _barrier_is_complete(state, version)):
        how = Ended(version=version, how="active", workers=serving)
        return with_offer(state, version, ended="active", due=None), [how]
    if newer and not underway and not serving:
        reason = f"version {max(state.offers)} was published before this one was active"
        return with_offer(state, version, ended="superseded", due=None), [
            Ended(version=version, how="superseded", reason=reason)
        ]
    if serving or newer:
        return state, []
    if not (state.awake and state.workers):
        return with_offer(state, version, due=None), []
    if offer.due is None:
        return with_offer(state, version, due=at + state.wait), []
    if at < offer.due:
        return state, []
    return _failed(state, offer)


def _barrier_is_complete(state: State, version: VersionId) -> bool:
    in_rotation = [w for w in state.workers.values() if w.out is None or w.out < version]
    return all(w.active == version for w in in_rotation)


def _failed(state: State, offer: Offer) -> Stepped:
    """Nobody serves the newest version in time: it is over for good, also for those on their way."""
    effects: list[Effect] = []
    underway = [w for w in state.workers.values() if w.on == offer.version and w.phase != "idle"]
    for worker in named(underway):
        why = f"version {offer.version} was not active in {state.wait:g} s"
        state, out = put_out(state, worker, why, abort=True)
        effects += out
    proof = "; its level 6 has not come to an end" if offer.proof == "wanted" else ""
    reason = f"active on no worker {state.wait:g} s after it could be staged{proof}{_refusals(state, offer.version)}"
    state = with_offer(state, offer.version, ended="failed", due=None)
    return state, [*effects, Ended(version=offer.version, how="failed", reason=reason)]


def proved(state: State, proof: Proved) -> Stepped:
    """The facts once level 6 has spoken. One that does not hold is over for good, on every worker, served by none."""
    offer = state.offers.get(proof.version)
    if offer is None or offer.ended or offer.proof != "wanted" or offer.digest != proof.digest:
        return state, []  # told again, or of a version that is over
    if proof.holds:
        return with_offer(state, proof.version, proof="holds"), []
    effects: list[Effect] = []
    underway = [w for w in state.workers.values() if w.on == offer.version and w.phase != "idle"]
    for worker in named(underway):
        state, out = put_out(state, worker, proof.reason, abort=True)
        state = with_workers(
            state, [replace(state.workers[worker.name], out=None, why="", late=-1)]
        )  # it did nothing wrong
        effects += out
    state = with_offer(state, proof.version, ended="refused", due=None)
    return state, [*effects, Ended(version=proof.version, how="refused", reason=proof.reason)]


def _refusals(state: State, version: VersionId) -> str:
    """Why workers are out for `version`, those with the same reason together; empty: none is."""
    by_reason: dict[str, list[str]] = {}
    for worker in named(state.workers.values()):
        if worker.out == version:
            by_reason.setdefault(worker.why, []).append(worker.name)
    return "".join(f"; {', '.join(names)}: {why}" for why, names in by_reason.items())


def _forget(state: State) -> State:
    """Drop ended offers that no worker is on and that are neither the newest nor the last good one."""
    top, good = max(state.offers, default=None), latest(state)
    keep = {w.on for w in state.workers.values()} | {w.active for w in state.workers.values()}
    keep |= {top, good.version if good else None}
    return replace(state, offers={v: o for v, o in state.offers.items() if v in keep or not o.ended})

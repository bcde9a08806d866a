"""What the activation machine knows, what it is told, and what it says. Shapes alone; `decide.py` decides.

Times are seconds of one monotonic clock that the caller reads; the machine has no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from immutables import Map
from msgspec.structs import replace

from syncline.contract.version_path import Ack, VersionId

Scope = Literal["barrier", "rolling"]


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the immutable shapes below."""


# ---- state ----
class Offer(Struct, frozen=True):
    """A published version that workers may be given."""

    version: VersionId
    digest: str  # of the manifest
    loaded: str  # `loaded_digest` of its tensors: what a worker must report
    canaries: bool  # a gap must be reported
    tolerance: float
    scope_began: bool = False  # commit was ordered: whoever verifies now commits at once
    ended: Literal["", "active", "superseded", "failed", "refused"] = ""
    proof: Literal["none", "wanted", "holds"] = "none"  # no worker may commit while it is wanted
    due: float | None = None  # it must be active on someone by then; None: the clock stands (nobody is awake)


class Worker(Struct, frozen=True):
    """A live rollout worker. `phase` is where it stands with the version in `on`."""

    name: str
    incarnation: str
    active: VersionId | None = None  # serves it; None: nothing verified
    loaded: str = ""  # loaded digest of what it serves; "": not known
    phase: Literal["idle", "staging", "verified", "committing"] = "idle"
    on: VersionId | None = None
    order: int = -1  # seq of the outstanding order; an ack must carry it
    due: float | None = None  # of the outstanding order; None: the clock stands
    out: VersionId | None = None  # out of rotation for this version until it joins again or a newer one comes
    why: str = ""  # it is out; "": it is not
    late: int = -1  # seq of a commit order that ran out of time: the worker may have obeyed all the same


class State(Struct, frozen=True):
    """Everything. `offers` holds the newest offer, the last active one and those that workers are on.

    `workers` shares what it has in common with the state before it, so that an answer costs no copy of the fleet.
    """

    wait: float  # limits.activation_wait
    seq: int  # of the last order
    scope: Scope
    awake: bool  # rollout is ordered awake: orders go out and clocks run
    newest: VersionId | None = None  # newest minted version heard of
    pending: tuple[VersionId, ...] = ()  # minted, not yet published
    offers: dict[VersionId, Offer] = {}
    workers: Map[str, Worker] = Map()
    refused: int = 0  # older versions and acks that nobody waits for, counted


# ---- events ----
class Minted(Struct, frozen=True):
    """A trainer's version is known; it is not converted yet."""

    version: VersionId


class Published(Struct, frozen=True):
    """A manifest is signed and stored. `complete`: told again after a restart; its scope was complete."""

    version: VersionId
    digest: str
    loaded: str
    canaries: bool
    tolerance: float
    complete: bool = False
    proof: bool = False  # it must pass level 6 before a worker commits it


class Proved(Struct, frozen=True):
    """What level 6 says of a published version."""

    version: VersionId
    digest: str
    holds: bool
    reason: str = ""


class Broken(Struct, frozen=True):
    """A version cannot be converted."""

    version: VersionId
    reason: str


class Acked(Struct, frozen=True):
    """A worker's answer, as it came."""

    ack: Ack


class Seen(Struct, frozen=True):
    """A worker lives; it says of itself that it serves `version` with manifest `digest`."""

    worker: str
    incarnation: str
    version: VersionId | None
    digest: str


class Lost(Struct, frozen=True):
    """A worker's heartbeat is gone, or the launcher saw it die."""

    worker: str


class Wanted(Struct, frozen=True):
    """The placement that the scheduler wants now."""

    scope: Scope
    awake: bool


class Tick(Struct, frozen=True):
    """Time has passed."""


Event = Minted | Published | Proved | Broken | Acked | Seen | Lost | Wanted | Tick


# ---- effects ----
class Order(Struct, frozen=True):
    """An order to append to `sync`."""

    order: Literal["stage", "commit", "abort"]
    version: VersionId
    digest: str
    workers: tuple[str, ...]
    seq: int


class Reached(Struct, frozen=True):
    """A worker got somewhere with a version: for its record. `ack` is what said so, if an ack did."""

    version: VersionId
    worker: str
    what: Literal["staged", "verified", "active", "left", "out"]
    verdict: str = ""
    reason: str = ""
    ack: Ack | None = None


class Ended(Struct, frozen=True):
    """A version's activation is over. `active`: its scope is complete, with `workers` serving it; `refused`: level 6
    does not hold."""

    version: VersionId
    how: Literal["active", "superseded", "failed", "refused"]
    workers: tuple[str, ...] = ()
    reason: str = ""


class Refused(Struct, frozen=True):
    """Something older or unasked for came; it was counted and changes nothing."""

    reason: str


Effect = Order | Reached | Ended | Refused


# ---- looking at and changing one part ----
def latest(state: State) -> Offer | None:
    """The offer that workers are to be brought to: the newest one, or if that failed the last active one."""
    good = [offer for offer in state.offers.values() if offer.ended in ("", "active")]
    return max(good, key=lambda offer: offer.version) if good else None


def with_workers(state: State, workers: Iterable[Worker]) -> State:
    """`state` with these workers added or replaced."""
    changed = {worker.name: worker for worker in workers}
    return replace(state, workers=state.workers.update(changed)) if changed else state


def named(workers: Iterable[Worker]) -> list[Worker]:
    """`workers` in the order of their names, which is the same in each process; a table's own order is not."""
    return sorted(workers, key=lambda worker: worker.name)


def with_offer(state: State, version: VersionId, **changes: Any) -> State:
    """`state` with fields of one offer changed."""
    return replace(state, offers={**state.offers, version: replace(state.offers[version], **changes)})


def idle(worker: Worker) -> Worker:
    """`worker` with no version under way."""
    return replace(worker, phase="idle", on=None, order=-1, due=None)

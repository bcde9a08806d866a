"""What the ledger says: its lines, groups, claims and refusals; and how they lie in Redis (see `ledger_lua.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from syncline.contract.token_path import parse_trajectory_id
from syncline.contract.version_path import VersionId

Policy = Literal["wait", "expire", "mask_old_tokens"]
State = Literal["running", "buffered", "trained", "filtered", "failed", "expired"]
Demand = Literal["", "signal", "whole"]
Ending = Literal["filtered", "failed", "expired"]
STATES: tuple[State, ...] = ("running", "buffered", "trained", "filtered", "failed", "expired")


class LedgerBroken(Exception):
    """A transition that no correct caller asks for. The message tells which, and what the ledger holds."""


class UnknownTrajectory(LedgerBroken):
    """The ledger has no such trajectory."""


class StampMismatch(LedgerBroken):
    """A record whose oldest span is not of the version under which the ledger let it begin."""


class LagBroken(LedgerBroken):
    """A group that can only be trained over the lag bound, under a policy that should have prevented it."""


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One trajectory's line. Stays after its record was forgotten."""

    trajectory: str
    state: State
    attempt: int
    group: int
    index: int
    prompt: int
    worker: str | None  # who began it; None: nobody has begun this attempt
    version: VersionId | None  # begun under; None as above
    update: int | None  # that trained it
    reason: str  # why it ended, "" while open or trained
    stream_id: str | None  # of its record in `trajectories`; None: not published, or forgotten
    work_id: str | None  # of its item in `work`; None: not running
    reward: Literal["scored", "unscored", "failed"] | None  # None: not rewarded
    tokens: int | None = None  # sampled, of the published record; None: none was published


class ClaimedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group claimed for an update. `missing`: members that ended before and cannot be trained."""

    group: int
    trajectories: tuple[str, ...]
    missing: tuple[str, ...]


class ClaimedRecord(msgspec.Struct, frozen=True, gc=False):
    """What the ledger holds of a claimed trajectory."""

    stream_id: str  # in `trajectories`; "": it has ended since, and its record is gone
    attempt: int
    reward: bytes | None  # a packed `Reward`


class Claim(msgspec.Struct, frozen=True, gc=False):
    """What one update trains, earliest deadline first."""

    update: int
    version: int
    groups: tuple[ClaimedGroup, ...]
    records: tuple[ClaimedRecord, ...] = ()  # of each of `trajectories`, where the claim was asked for

    @property
    def trajectories(self) -> tuple[str, ...]:
        """All living members, in order."""
        return tuple(id for group in self.groups for id in group.trajectories)


class OpenGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group that has not ended."""

    size: int
    accounted: int  # members rewarded or ended
    ended: int
    oldest: int  # oldest version number begun by a living member; -1: none has begun
    phase: Literal["open", "ready", "claimed"]
    update: int  # claimed for; -1: not claimed
    demand: Demand = ""

    @property
    def begun(self) -> bool:
        """Whether the lag bound speaks of it: a member is sampled or has been, and no update has it yet."""
        return self.phase != "claimed" and self.oldest >= 0


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """How a group ended. Stamped by the ledger, once per group, in the order in which they ended."""

    group: int
    prompt: int
    how: Literal["trained", "filtered", "failed", "expired"]  # failed or expired: no member was left
    reason: str  # "" where it was trained
    scored: (
        int  # members with a reward; of the trained ones, or of those that were filtered for their rewards
    )
    mean: float  # of their rewards; 0.0 where none is scored, as the next two
    low: float
    high: float


class Line(msgspec.Struct, array_like=True, gc=False):
    """A `LedgerEntry` as stored, see `ledger_lua.py`."""

    state: State
    attempt: int
    worker: str
    number: int
    epoch: int
    group: int
    index: int
    prompt: int
    update: int
    work_id: str
    stream_id: str
    reason: str
    reward: Literal["scored", "unscored", "failed", ""]
    retry: str
    tokens: int


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment on disk says of one member of a group, for a ledger that has forgotten it."""

    index: int
    prompt: int
    state: Literal["trained", "filtered", "failed"]
    reason: str
    attempt: int
    version: VersionId | None  # begun under; None: its record is gone
    tokens: int  # sampled; -1 as above


class StoredClaim(msgspec.Struct, array_like=True, gc=False):
    """A claim as stored."""

    version: int
    before: int
    groups: tuple[ClaimedGroup, ...]


LINE = msgspec.msgpack.Decoder(Line)
GROUP = msgspec.msgpack.Decoder(OpenGroup)
STORED = msgspec.msgpack.Decoder(StoredClaim)


def claim_of(
    update: int, raw: bytes, lines: Sequence[bytes | None], rewards: Sequence[bytes | None]
) -> Claim:
    """A claim as the script tells it: as stored, and of each living member the line and the reward."""
    stored = STORED.decode(raw)
    claim = Claim(update, stored.version, stored.groups)
    records = []
    for trajectory, line, reward in zip(claim.trajectories, lines, rewards, strict=True):
        if line is None:
            raise LedgerBroken(f"update {update} has claimed {trajectory}, which is not in the ledger")
        held = LINE.decode(line)
        records.append(ClaimedRecord(held.stream_id, held.attempt, reward))
    return msgspec.structs.replace(claim, records=tuple(records))


def entry_of(trajectory: str, raw: bytes) -> LedgerEntry:
    line = LINE.decode(raw)
    parse_trajectory_id(trajectory)
    return LedgerEntry(
        trajectory=trajectory,
        state=line.state,
        attempt=line.attempt,
        group=line.group,
        index=line.index,
        prompt=line.prompt,
        worker=line.worker or None,
        version=None if line.number < 0 else VersionId(line.epoch, line.number),
        update=None if line.update < 0 else line.update,
        reason=line.reason,
        stream_id=line.stream_id or None,
        work_id=line.work_id or None,
        reward=line.reward or None,
        tokens=None if line.tokens < 0 else line.tokens,
    )

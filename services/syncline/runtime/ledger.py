"""The ledger: where each trajectory is, exactly once. Atomic transitions, one conservation law.

A trajectory is running, buffered, trained, filtered, failed or expired; the last four are terminal and it
gets one of them. At any moment submitted = running + buffered + trained + filtered + failed + expired.
Members of a group are claimed together. The lag decisions are those of `contract/lag.py`, made on the server.

Any method may be repeated after a lost reply: the second run changes nothing. The transitions themselves are
in `ledger_lua.py`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import msgspec

from syncline.contract import lag
from syncline.contract.events import LedgerSample, WorkItem
from syncline.contract.streams import (
    CLAIMS,
    COUNTS,
    DEAD,
    ENTRIES,
    GROUPS,
    READY,
    REWARDS,
    TRAJECTORIES,
    WORK,
)
from syncline.contract.token_path import Reward, Trajectory, encode, parse_trajectory_id, trajectory_id
from syncline.contract.version_path import VersionId
from syncline.runtime import ledger_lua as lua
from syncline.runtime.bus import Bus, Value, pack

Policy = Literal["wait", "expire", "mask_old_tokens"]
State = Literal["running", "buffered", "trained", "filtered", "failed", "expired"]
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


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
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


class ClaimedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group claimed for an update. `missing`: members that ended before and cannot be trained."""

    group: int
    trajectories: tuple[str, ...]
    missing: tuple[str, ...]


class Claim(msgspec.Struct, frozen=True):
    """What one update trains, earliest deadline first."""

    update: int
    version: int
    groups: tuple[ClaimedGroup, ...]

    @property
    def trajectories(self) -> tuple[str, ...]:
        """All living members, in order."""
        return tuple(id for group in self.groups for id in group.trajectories)


class OpenGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that has not ended."""

    size: int
    accounted: int  # members rewarded or ended
    ended: int
    oldest: int  # oldest version number begun by a living member; -1: none has begun
    phase: Literal["open", "ready", "claimed"]
    update: int  # claimed for; -1: not claimed


class _Line(msgspec.Struct, array_like=True):
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


class _Stored(msgspec.Struct, array_like=True):
    """A claim as stored."""

    version: int
    before: int
    groups: tuple[ClaimedGroup, ...]


_LINE = msgspec.msgpack.Decoder(_Line)
_GROUP = msgspec.msgpack.Decoder(OpenGroup)
_STORED = msgspec.msgpack.Decoder(_Stored)


class Ledger:
    """The ledger of one job. All processes of a job give the same batch, lag and policy.

    batch_groups   groups per update
    max_lag        largest lag, in updates, at which a token may be trained
    policy         what happens when the bound cannot be kept otherwise
    max_attempts   tries at one trajectory before it ends as failed
    """

    def __init__(
        self, bus: Bus, job: str, *, batch_groups: int, max_lag: int, policy: Policy, max_attempts: int
    ) -> None:
        self.job = job
        self.batch_groups, self.max_lag, self.policy = batch_groups, max_lag, policy
        self.max_attempts = max_attempts
        self._bus = bus
        names = (ENTRIES, COUNTS, GROUPS, READY, REWARDS, CLAIMS, WORK, TRAJECTORIES, DEAD)
        self._keys = [key.at(job) for key in names]

    # ---- rollout and scheduler ----------------------------------------------------------------------------
    def submit(self, items: Sequence[WorkItem], group_size: int) -> bool:
        """Enter one whole group as running and put its items into `work`. False: the group is known already.

        Raises `ValueError` unless `items` are the members 0 .. group_size - 1 of one group of this job.
        """
        group = items[0].group if items else -1
        wanted = [(self.job, trajectory_id(self.job, group, i), group, i) for i in range(group_size)]
        if [(i.job, i.trajectory, i.group, i.index) for i in items] != wanted:
            raise ValueError(f"submit takes the {group_size} members of one group of {self.job}, in order")
        args: list[Value] = [group, group_size]
        for item in items:
            args += [item.trajectory, item.index, item.prompt, pack(item)]
        return bool(self._run(lua.SUBMIT, args))

    def attempt(self, trajectory: str) -> int:
        """The attempt that may now sample it. Raises `UnknownTrajectory`."""
        return self._known(trajectory).attempt

    def begin(
        self, trajectory: str, attempt: int, worker: str, version: VersionId
    ) -> Literal["go", "wait", "fenced"]:
        """May `worker` begin to sample under `version`? `go` records it; a later retry clears it again.

        `wait`: beginning now could break the lag bound, ask again when time has passed or a version has come.
        `fenced`: this attempt is not the present one, or another worker has begun it; drop it.
        """
        args = [self.job, trajectory, attempt, worker, version.number, version.epoch, *self._law()]
        return cast(Literal["go", "wait", "fenced"], self._run(lua.BEGIN, args).decode())

    def publish(self, trajectory: Trajectory, work_id: str) -> Literal["published", "fenced"]:
        """Buffer the record and acknowledge its work item. `fenced`: not the present attempt; drop it.

        Raises `StampMismatch` if the record's oldest span is not of the version it began under.
        """
        return self.publish_many([(trajectory, work_id)])[0]

    def publish_many(self, records: Sequence[tuple[Trajectory, str]]) -> list[Literal["published", "fenced"]]:
        """`publish` for several (record, work item id) in one round trip; each is atomic by itself."""
        calls: list[tuple[Sequence[str], Sequence[Value]]] = []
        for record, _ in records:
            begun = record.oldest
            args: list[Value] = [record.trajectory, record.attempt, begun.number, begun.epoch]
            calls.append((self._keys, [*args, *(part for pair in encode(record).items() for part in pair)]))
        answers: list[Literal["published", "fenced"]] = []
        for (record, _), reply in zip(records, self._bus.script_many(lua.PUBLISH, calls), strict=True):
            answer = reply.decode()
            if answer not in ("published", "fenced"):
                raise StampMismatch(
                    f"trajectory {record.trajectory} attempt {record.attempt}: its oldest span says version "
                    f"{record.oldest}, the ledger let it begin under {answer}"
                )
            answers.append(answer)
        return answers

    def retry(self, trajectory: str, work_id: str, why: str) -> int | None:
        """Give a running trajectory to its next attempt and return that one's number.

        None: nothing is left to do, and the work item is acknowledged: the trajectory was not running any
        more, or its attempts are used up and it ended as failed, with `why`.
        """
        token = secrets.token_hex(6)
        args: list[Value] = [self.job, trajectory, work_id, why, self.max_attempts, token]
        return int(self._run(lua.RETRY, args)) or None

    def lost_work(self) -> list[LedgerEntry]:
        """Running trajectories whose work item is gone from the stream (somebody trimmed or deleted it)."""
        running = [entry for entry in self._open_entries() if entry.state == "running"]
        there = {entry.id for entry in self._bus.range(WORK.at(self.job))}
        lost = {entry.trajectory for entry in running if entry.work_id not in there}
        return [entry for entry in self.entries(lost).values() if entry.state == "running"] if lost else []

    def resubmit(self, item: WorkItem) -> int | None:
        """Put a lost work item back; returns the new attempt. None: not running, or its item is there."""
        return int(self._run(lua.RESUBMIT, [self.job, item.trajectory, pack(item)])) or None

    # ---- errands ------------------------------------------------------------------------------------------
    def reward(self, reward: Reward) -> bool:
        """Store a buffered trajectory's reward. False: the attempt is fenced, or it is rewarded already.

        Raises `ValueError` unless the value is finite exactly when the state is `scored`.
        """
        if (reward.state == "scored") != (reward.value is not None and math.isfinite(reward.value)):
            raise ValueError(
                f"reward of {reward.trajectory} is {reward.state} with value {reward.value}: a value is "
                "finite if scored and None otherwise"
            )
        args: list[Value] = [self.job, reward.trajectory, reward.attempt, reward.state, pack(reward)]
        return bool(self._run(lua.REWARD, args))

    def unrewarded(self, older_than: float) -> list[LedgerEntry]:
        """Buffered trajectories without a reward whose record is older than so many seconds."""
        seconds, micros = self._bus.many([("TIME",)])[0]  # record ids carry the server's clock too
        now = int(seconds) + int(micros) / 1e6
        return [
            entry
            for entry in self._open_entries()
            if entry.state == "buffered"
            and entry.reward is None
            and entry.stream_id is not None
            and now - int(entry.stream_id.split("-")[0]) / 1000 >= older_than
        ]

    # ---- trainer ------------------------------------------------------------------------------------------
    def claim(self, update: int, version: int) -> Claim | None:
        """Claim the groups of `update`, which is made at `version`, earliest deadline first. None: wait.

        The same update gets the same claim again. Raises `LagBroken` if policy `wait` would train over the
        bound, and `LedgerBroken` if `update` is claimed at another version.
        """
        reply = self._run(lua.CLAIM, [self.job, update, version, *self._law()])
        if reply is None:
            return None
        if isinstance(reply, list):
            raise LagBroken(
                f"update {update} at version {version}: {reply[0].decode()}, max_lag is {self.max_lag}"
            )
        stored = _STORED.decode(reply)
        if stored.version != version:
            raise LedgerBroken(f"update {update} is claimed at version {stored.version}, not {version}")
        return Claim(update, version, stored.groups)

    def unclaim(self, update: int) -> bool:
        """Undo a claim: its groups are ready again. False: nothing is claimed for `update`."""
        return bool(self._run(lua.UNCLAIM, [self.job, update]))

    def claims(self) -> dict[int, Claim]:
        """Claims that are neither trained nor undone, by update."""
        fields = self._bus.hgetall(CLAIMS.at(self.job))
        fields.pop(b"version", None)
        stored = {int(update): _STORED.decode(raw) for update, raw in fields.items()}
        return {update: Claim(update, one.version, one.groups) for update, one in sorted(stored.items())}

    def claimed_version(self) -> int:
        """The version whose update was claimed last, -1 before the first claim."""
        return int(self._bus.hget(CLAIMS.at(self.job), "version") or -1)

    def trained(self, update: int, trajectories: Sequence[str]) -> None:
        """These claimed trajectories are trained; every other one of the claim must have ended before.

        Raises `LedgerBroken` and changes nothing otherwise. Repeating it for the same update changes nothing.
        """
        story = self._run(lua.TRAINED, [update, *trajectories])
        if story is not None:
            raise LedgerBroken(f"trained({update}): {story.decode()}")

    def end(self, trajectory: str, state: Ending, reason: str) -> bool:
        """End it without training; its work item, record and reward go. False: it has ended already.

        Raises `UnknownTrajectory`.
        """
        if state not in ("filtered", "failed", "expired"):
            raise ValueError(f"end of {trajectory}: state {state!r} is none of filtered, failed, expired")
        done = int(self._run(lua.END, [self.job, trajectory, state, reason]))
        if done < 0:
            raise UnknownTrajectory(
                f"trajectory {trajectory} cannot end as {state}: the ledger has none such"
            )
        return done == 1

    def overdue(self, version: int) -> list[int]:
        """Unclaimed groups whose lag at `version` is over the bound: to be expired, or masked, by policy."""
        begun = {name: group.oldest for name, group in self.groups().items() if _unclaimed(group)}
        return lag.overdue(begun, version, self.max_lag)

    def forget(self, trajectories: Sequence[str]) -> None:
        """Remove records and rewards of ended trajectories, once a checkpoint holds their effect.

        Their lines stay. Raises `LedgerBroken`, and removes nothing, if one of them has not ended.
        """
        story = self._run(lua.FORGET, list(trajectories))
        if story is not None:
            raise LedgerBroken(f"forget: {story.decode()}")

    # ---- looking ------------------------------------------------------------------------------------------
    def counts(self) -> dict[str, int]:
        """The sums: `submitted` and each state in trajectories; `claimed` and `groups_lost` in groups;
        `fenced`, `refused`, `retried`, `resubmitted` in calls."""
        fields = self._bus.hgetall(COUNTS.at(self.job))
        found = {name.decode(): int(value) for name, value in fields.items() if b":" not in name}
        names = (
            "submitted",
            *STATES,
            "claimed",
            "groups_lost",
            "fenced",
            "refused",
            "retried",
            "resubmitted",
        )
        return {name: found.get(name, 0) for name in names}

    def sample(self, at: float) -> LedgerSample:
        """The sums of one moment and whether the law holds. `at`: wall-clock unix seconds."""
        sums = self.counts()
        states = {state: sums[state] for state in STATES}
        holds = sums["submitted"] == sum(states.values()) and min(states.values()) >= 0
        return LedgerSample(submitted=sums["submitted"], **states, holds=holds, at=at)

    def entry(self, trajectory: str) -> LedgerEntry | None:
        """Its line, or None."""
        return self.entries([trajectory]).get(trajectory)

    def entries(self, trajectories: Iterable[str]) -> dict[str, LedgerEntry]:
        """Lines of those that the ledger knows, in one round trip."""
        asked = list(trajectories)
        found = self._bus.hmget(ENTRIES.at(self.job), asked)
        return {name: _entry(name, raw) for name, raw in zip(asked, found, strict=True) if raw is not None}

    def open_groups(self) -> int:
        """Groups that have not ended: what `lag.credits` takes."""
        return self._bus.hlen(GROUPS.at(self.job))

    def ready_groups(self) -> int:
        """Groups whose every member is rewarded or ended, and which are not claimed."""
        return self._bus.zcard(READY.at(self.job))

    def groups(self) -> dict[int, OpenGroup]:
        """All open groups."""
        fields = self._bus.hgetall(GROUPS.at(self.job))
        return {
            int(name): _GROUP.decode(raw) for name, raw in sorted(fields.items(), key=lambda f: int(f[0]))
        }

    def members(self, group: int, size: int) -> list[LedgerEntry]:
        """Lines of a group's members, in order."""
        return list(self.entries(trajectory_id(self.job, group, i) for i in range(size)).values())

    def recount(self) -> dict[str, int]:
        """The states counted from the lines themselves: slow, for audits of `counts`."""
        sums = dict.fromkeys(("submitted", *STATES), 0)
        for raw in self._bus.hgetall(ENTRIES.at(self.job)).values():
            sums["submitted"] += 1
            sums[_LINE.decode(raw).state] += 1
        return sums

    # ---- inside -------------------------------------------------------------------------------------------
    def _run(self, script: str, args: Sequence[Value]) -> Any:
        return self._bus.script(script)(self._keys, args)

    def _law(self) -> tuple[Value, ...]:
        return (self.batch_groups, self.max_lag, self.policy)

    def _known(self, trajectory: str) -> LedgerEntry:
        entry = self.entry(trajectory)
        if entry is None:
            raise UnknownTrajectory(f"trajectory {trajectory} is not in the ledger of {self.job}")
        return entry

    def _open_entries(self) -> list[LedgerEntry]:
        ids = (trajectory_id(self.job, g, i) for g, group in self.groups().items() for i in range(group.size))
        return list(self.entries(ids).values())


def _unclaimed(group: OpenGroup) -> bool:
    return group.phase != "claimed" and group.oldest >= 0


def _entry(trajectory: str, raw: bytes) -> LedgerEntry:
    line = _LINE.decode(raw)
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

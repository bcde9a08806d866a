"""The ledger for readers: sums, lines, groups and claims. Changes nothing and needs no job spec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from syncline.contract.events import LedgerSample
from syncline.contract.streams import CLAIMS, COUNTS, ENTRIES, GROUPS, HELD, OUTCOMES, READY, WORK
from syncline.contract.token_path import trajectory_id
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.ledger_shapes import (
    GROUP,
    STATES,
    STORED,
    Claim,
    LedgerEntry,
    OpenGroup,
    Outcome,
    State,
    UnknownTrajectory,
    entry_of,
)
from syncline.runtime.messages import pairs_of

_PAGE = 2000  # lines that a scan asks for at once
# Where lines are looked for, so that one that moves meanwhile is not missed: they go from the first to the second, and
# the other way once, if the job was begun before there was `held`.
_PLACES = (HELD, ENTRIES, HELD)


class LedgerView:
    """What one job's ledger holds now."""

    def __init__(self, bus: Bus, job: str) -> None:
        self.job = job
        self._bus = bus

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
        """Lines of those that the ledger knows: in one round trip of those that hold a record or work."""
        asked = list(trajectories)
        found = self._stored(asked)
        return {name: entry_of(name, found[name]) for name in asked if name in found}

    def in_state(self, trajectories: Sequence[str], state: State) -> tuple[int, list[LedgerEntry]]:
        """How many of them the ledger knows, and the lines of those that are `state`: of the others, the state alone is
        looked at, which a line begins with."""
        found = self._stored(trajectories)
        mark = msgspec.msgpack.encode(state)
        head = len(mark) + 3  # an array's size takes one byte or three
        lines = [entry_of(name, found[name]) for name in trajectories if mark in found.get(name, b"")[:head]]
        return len(found), [line for line in lines if line.state == state]

    def open_groups(self) -> int:
        """Groups that have not ended: what `lag.credits` takes."""
        return self._bus.hlen(GROUPS.at(self.job))

    def ready_groups(self) -> int:
        """Groups whose every member is rewarded or ended, and which are not claimed."""
        return self._bus.zcard(READY.at(self.job))

    def groups(self) -> dict[int, OpenGroup]:
        """All open groups."""
        return _groups(self._bus.hgetall(GROUPS.at(self.job)))

    def between_claims(self) -> tuple[int, dict[int, OpenGroup]] | None:
        """`claimed_version` and `groups` in one round trip; None: a claim was made or undone while they were read."""
        claimed = ("HGET", CLAIMS.at(self.job), "version")
        before, fields, after = self._bus.many([claimed, ("HGETALL", GROUPS.at(self.job)), claimed])
        return (int(before or -1), _groups(pairs_of(fields))) if after == before else None

    def outcomes(self, after: str, count: int) -> list[tuple[str, Outcome]]:
        """How groups ended, with cursors, oldest first: the next `count` after cursor `after` ("0": all)."""
        key = OUTCOMES.at(self.job)
        entries = self._bus.read({key: after}, block=None, count=count).get(key, [])
        return [(entry.id, unpack(entry, Outcome)) for entry in entries]

    def drop_outcomes(self, before: str) -> None:
        """Forget those before this cursor, which somebody has saved."""
        self._bus.trim(OUTCOMES.at(self.job), before)

    def members(self, group: int, size: int) -> list[LedgerEntry]:
        """Lines of a group's members, in order."""
        return list(self.entries(trajectory_id(self.job, group, i) for i in range(size)).values())

    def open_lines(self) -> Iterator[LedgerEntry]:
        """Lines of the members of all groups that are open now, group by group: one may be ended while they come."""
        for group, one in self.groups().items():
            yield from self.members(group, one.size)

    def recount(self) -> dict[str, int]:
        """The states counted from the lines themselves: slow, for audits of `counts`."""
        sums = dict.fromkeys(("submitted", *STATES), 0)
        for entry in self.lines():
            sums["submitted"] += 1
            sums[entry.state] += 1
        return sums

    def lines(self) -> Iterator[LedgerEntry]:
        """Every trajectory once, though a scan may come by one again. Page by page: all at once may be gigabytes."""
        told: set[bytes] = set()
        for key in _PLACES:
            cursor = b"0"
            while True:
                cursor, flat = self._bus.call("HSCAN", key.at(self.job), cursor, "COUNT", _PAGE)
                for name, raw in zip(flat[::2], flat[1::2], strict=True):
                    if name not in told:
                        told.add(name)
                        yield entry_of(name.decode(), raw)
                if cursor == b"0":
                    break

    def size(self) -> int:
        """How many lines there are."""
        return sum(self._bus.hlen(key.at(self.job)) for key in (HELD, ENTRIES))

    def attempt(self, trajectory: str) -> int:
        """The attempt that may now sample it. Raises `UnknownTrajectory`."""
        return self._known(trajectory).attempt

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

    def lost_work(self) -> list[LedgerEntry]:
        """Running trajectories whose work item is gone from the stream (somebody trimmed or deleted it)."""
        running = [entry for entry in self._open_entries() if entry.state == "running"]
        there = {entry.id for entry in self._bus.range(WORK.at(self.job))}
        lost = {entry.trajectory for entry in running if entry.work_id not in there}
        return [entry for entry in self.entries(lost).values() if entry.state == "running"] if lost else []

    def claims(self) -> dict[int, Claim]:
        """Claims that are neither trained nor undone, by update."""
        fields = self._bus.hgetall(CLAIMS.at(self.job))
        fields.pop(b"version", None)
        stored = {int(update): STORED.decode(raw) for update, raw in fields.items()}
        return {update: Claim(update, one.version, one.groups) for update, one in sorted(stored.items())}

    def claimed_version(self) -> int:
        """The version whose update was claimed last, -1 before the first claim."""
        return int(self._bus.hget(CLAIMS.at(self.job), "version") or -1)

    def _stored(self, trajectories: Sequence[str]) -> dict[str, bytes]:
        """Their lines as stored, wherever they lie."""
        found: dict[str, bytes] = {}
        for key in _PLACES:
            absent = [name for name in trajectories if name not in found]
            for name, raw in zip(absent, self._bus.hmget(key.at(self.job), absent), strict=True):
                if raw is not None:
                    found[name] = raw
        return found

    def _known(self, trajectory: str) -> LedgerEntry:
        entry = self.entry(trajectory)
        if entry is None:
            raise UnknownTrajectory(f"trajectory {trajectory} is not in the ledger of {self.job}")
        return entry

    def _open_entries(self) -> list[LedgerEntry]:
        ids = (trajectory_id(self.job, g, i) for g, group in self.groups().items() for i in range(group.size))
        return list(self.entries(ids).values())


def _groups(fields: Mapping[bytes, bytes]) -> dict[int, OpenGroup]:
    return {int(name): GROUP.decode(raw) for name, raw in sorted(fields.items(), key=lambda f: int(f[0]))}

"""Which segment holds a trajectory: a small SQLite index beside a job's segments, built when it is first asked.

A cache and nothing more: it may be deleted at any time, and is compared with the folder before it is believed. A
segment that was written again (its step was skipped) is read again. Segments are renamed into place, which changes the
folder's own time: while that stays, the folder, which may hold thousands of files, is not gone through again.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from syncline.contract.token_path import parse_trajectory_id
from syncline.runtime import segments
from syncline.runtime.segment_files import stamps

FILE = "lineage.sqlite"
BUSY_SECONDS = 20.0
SETTLED_NS = 5 * 10**9  # age of a folder's time from which on another change cannot bear the same one
_SCHEMA = """
create table if not exists segment (
  number integer primary key, mtime_ns integer not null, size integer not null
);
create table if not exists member (
  trajectory text not null, number integer not null, use text not null,
  grp integer not null, idx integer not null,
  primary key (trajectory, number)
) without rowid;
create index if not exists member_number on member (number);
create table if not exists folder (mtime_ns integer not null);
create index if not exists member_place on member (grp, idx);
create index if not exists member_use on member (use, grp, idx);
"""


class Member(msgspec.Struct, frozen=True):
    """A trajectory's place: the update whose segment holds it, and what that update did with it."""

    trajectory: str
    update: int
    use: Literal["train", "filtered"]


class SegmentIndex:
    """The index of one job's `folder` (the one that has `segments/`). Safe to use from several processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments = folder / "segments"

    def find(self, trajectory: str) -> Member | None:
        """Where the trajectory is: trained if it was ever trained, else where it was filtered last."""
        with self._open() as db:
            found = self._find(db, trajectory)
            if found is None or not self._fresh(db, found.update):
                self._refresh(db, doubted=found is not None)
                found = self._find(db, trajectory)
            return found

    def page(
        self, *, use: str | None, update: int | None, group: int | None, after: tuple[int, int], limit: int
    ) -> list[Member]:
        """Members by group and index, from behind `after`; None: any."""
        with self._open() as db:
            self._refresh(db)
            # conditions that nobody asked for would keep SQLite from its indexes; an update has few members, of any use
            of_use = "use" if update is None else "+use"
            asked = {of_use: use, "number": update, "grp": group}
            given = {column: value for column, value in asked.items() if value is not None}
            rows = db.execute(
                f"select trajectory, number, use from member where (grp, idx) > (?, ?)"
                f"{''.join(f' and {column} = ?' for column in given)} order by grp, idx, number limit ?",
                (*after, *given.values(), limit),
            )
            return [Member(*row) for row in rows]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self._folder / FILE, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            db.execute("pragma journal_mode = wal")
            db.executescript(_SCHEMA)
            yield db
        finally:
            db.close()

    def _find(self, db: sqlite3.Connection, trajectory: str) -> Member | None:
        row = db.execute(
            "select trajectory, number, use from member where trajectory = ?"
            " order by use = 'train' desc, number desc limit 1",
            (trajectory,),
        ).fetchone()
        return None if row is None else Member(*row)

    def _fresh(self, db: sqlite3.Connection, update: int) -> bool:
        known = db.execute("select mtime_ns, size from segment where number = ?", (update,)).fetchone()
        return known is not None and known == self._stamp(update)

    def _stamp(self, update: int) -> tuple[int, int] | None:
        try:
            stat = segments.segment_path(self._segments, update).stat()
        except FileNotFoundError:
            return None
        return stat.st_mtime_ns, stat.st_size

    def _changed(self) -> int:
        """The folder's time of change in nanoseconds, 0: there is none."""
        try:
            return self._segments.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _refresh(self, db: sqlite3.Connection, doubted: bool = False) -> None:
        """Make the index agree with the folder. `doubted`: whatever the folder's time says."""
        now, folder = time.time_ns(), self._changed()
        told = db.execute("select mtime_ns from folder").fetchone()
        if told == (folder,) and not doubted:
            return
        known = {number: (mtime, size) for number, mtime, size in db.execute("select * from segment")}
        there = stamps(self._segments)
        stale = [update for update, stamp in there.items() if known.get(update) != stamp]
        gone = [update for update in known if update not in there]
        read = [(update, there[update], self._members(update)) for update in stale]
        settled = now - folder > SETTLED_NS
        if not (read or gone or settled or told):
            return
        db.execute("begin immediate")
        db.execute("delete from folder")
        if settled:
            db.execute("insert into folder values (?)", (folder,))
        for update in [*gone, *stale]:
            db.execute("delete from segment where number = ?", (update,))
            db.execute("delete from member where number = ?", (update,))
        for update, stamp, members in read:
            db.execute("insert into segment values (?, ?, ?)", (update, *stamp))
            db.executemany("insert into member values (?, ?, ?, ?, ?)", members)
        db.execute("commit")

    def _members(self, update: int) -> Sequence[tuple[str, int, str, int, int]]:
        rows = segments.members(segments.segment_path(self._segments, update))
        return [(name, update, use, *parse_trajectory_id(name)[1:]) for name, use in rows]

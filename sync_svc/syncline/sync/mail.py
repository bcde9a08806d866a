"""What sync reads: the streams `minted` and `acks`, in its group; what cannot be read goes to the dead letters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from syncline.contract.streams import DEAD, GROUP_SYNC, SYNC, Key
from syncline.contract.version_path import SyncOrder
from syncline.runtime.bus import BadMessage, Bus, Entry, Value, unpack
from syncline.runtime.lease import Lease

T = TypeVar("T")

CONSUMER = "sync"  # one name for all incarnations: a new one inherits what the last one left pending
LETTERS = 10_000  # dead letters kept
_LOG = logging.getLogger("syncline.sync")


def acknowledged(key: str, id: str) -> list[list[Value]]:
    """Commands that end an entry."""
    return [["XACK", key, GROUP_SYNC, id], ["XDEL", key, id]]


class Mail:
    """Reads for one job."""

    def __init__(self, bus: Bus, lease: Lease, job: str) -> None:
        self._bus, self._lease, self._job = bus, lease, job

    def new(self, key: Key, type: type[T]) -> list[tuple[str, T]]:
        """(id, message) of what came since the last call."""
        name = key.at(self._job)
        return self._readable(name, self._bus.group_read(name, GROUP_SYNC, CONSUMER, 100, None), type)

    def pending(self, key: Key, type: type[T]) -> list[tuple[str, T]]:
        """(id, message) of what was read and not acknowledged, by this process or the last one."""
        name = key.at(self._job)
        return self._readable(name, self._bus.group_pending(name, GROUP_SYNC, CONSUMER), type)

    def last_seq(self) -> int:
        """Number of the last order that was written; -1: none was."""
        key = SYNC.at(self._job)
        last = self._bus.last_id(key)
        entries = self._bus.range(key, last, last) if last != "0" else []
        return unpack(entries[0], SyncOrder).seq if entries else -1

    def _readable(self, key: str, entries: Sequence[Entry], type: type[T]) -> list[tuple[str, T]]:
        found = []
        for entry in entries:
            try:
                found.append((entry.id, unpack(entry, type)))
            except BadMessage as error:
                self._dead(key, entry, error)
        return found

    def _dead(self, key: str, entry: Entry, error: BadMessage) -> None:
        _LOG.error("dead letter: %s", error)
        body = entry.fields.get(b"m", b"")
        dead = DEAD.at(self._job)
        letter: list[Value] = ["XADD", dead, "MAXLEN", "~", LETTERS, "*", "key", key, "id", entry.id]
        self._lease.transact([[*letter, "reason", str(error), "m", body], *acknowledged(key, entry.id)])

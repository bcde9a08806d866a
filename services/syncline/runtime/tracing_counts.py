"""Counts of a process and of those that it forked: what the family's traces hold, and what they lack.

A Celery worker's children end the spans, and their parent tells of them. So the counts lie in memory that a fork
shares; each process adds to a row of its own, and the row of a child that died, however it died, stays.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

ROWS = 1024  # a process's is its pid modulo this: pids of one family lie close together
_BYTES = 8


class Counts:
    """Integers by name, from 0. `names` are fixed before the first fork."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._cells = memoryview(mmap.mmap(-1, ROWS * max(1, len(names)) * _BYTES)).cast("q")
        self._lock, self._pid = threading.Lock(), os.getpid()

    def add(self, name: str, by: int = 1) -> None:
        """Count."""
        if self._pid != os.getpid():  # the lock may have been held by a thread that did not come along
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            self._cells[self._at(name)] += by

    def own(self, name: str) -> int:
        """What this process has counted."""
        return self._cells[self._at(name)]

    def total(self, name: str) -> int:
        """What the family has counted."""
        return sum(self._cells[self._places[name] :: len(self._places)])

    def _at(self, name: str) -> int:
        return os.getpid() % ROWS * len(self._places) + self._places[name]

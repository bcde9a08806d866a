"""Answers that are made from all of a job's ledger: of a large job, one at a time, and told again for a while.

A summary of a million trajectories takes seconds and hundreds of megabytes. Many clients that ask at once must not take
that many times as much, nor the threads that others need: one is made, those who ask meanwhile get the last one, or
a few wait for the first, and the rest are told to come back.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from syncline.gateway.errors import Refusal
from syncline.gateway.records import JobRecord
from syncline.gateway.reporter import EVIDENCE
from syncline.runtime.bus import Bus
from syncline.runtime.ledger_view import LedgerView

LARGE = 20_000  # trajectories, from which on a job is one
LARGE_BYTES = 4 * 1024 * 1024  # of evidence on disk
AS_LONG = 10.0  # times what an answer took to make, it is told again
KEPT = 8  # answers
WAITING = 3  # threads that may wait for a first answer
PATIENCE = 20.0  # seconds that they do


class LargeJobs:
    """Safe for threads."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._making = threading.Lock()
        self._waiting = threading.Semaphore(WAITING)
        self._made: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()

    def answer(self, record: JobRecord, what: str, make: Callable[[], bytes]) -> bytes:
        """What `make` returns; of a large job, perhaps of a while ago. Raises `Refusal` 503 when too many wait."""
        if not self._large(record):
            return make()
        kept = self._made.get((record.id, what))
        if kept is not None and (time.monotonic() < kept[0] or not self._making.acquire(blocking=False)):
            return kept[1]
        if kept is None:
            self._wait()
        try:
            again = self._made.get((record.id, what))
            if again is not None and time.monotonic() < again[0]:  # somebody else has made it meanwhile
                return again[1]
            began = time.monotonic()
            made = make()
            now = time.monotonic()
            self._made[record.id, what] = (now + AS_LONG * (now - began), made)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
            return made
        finally:
            self._making.release()

    def _wait(self) -> None:
        if not self._waiting.acquire(blocking=False):
            raise _busy()
        try:
            if not self._making.acquire(timeout=PATIENCE):
                raise _busy()
        finally:
            self._waiting.release()

    def _large(self, record: JobRecord) -> bool:
        if record.recorded:
            return LedgerView(self._bus, record.id).size() >= LARGE
        path = record.folder / EVIDENCE
        return path.is_file() and path.stat().st_size >= LARGE_BYTES


def _busy() -> Refusal:
    detail = "a large job's report is being made, and others wait for it"
    return Refusal(503, "report-busy", detail, headers={"Retry-After": "10"})

"""Conversion's work on single tensors, in a few threads that together stay within a bound of memory.

Which thread does what, and when, decides nothing: results come back in the order of the jobs, and of several errors
the first in that order is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Job(NamedTuple, Generic[T]):
    """One piece of work. `cost`: bytes of memory that it takes while it runs."""

    cost: int
    run: Callable[[], T]


class Pool:
    """`threads` at once, of which those that run may cost `limit` bytes together; one that costs more runs alone."""

    def __init__(self, threads: int, limit: int) -> None:
        self._threads, self._limit = threads, limit

    def done(self, jobs: Sequence[Job[T]]) -> list[T]:
        """The results of `jobs`, in their order. Raises what the first of them that fails raises."""
        if self._threads == 1:
            return [job.run() for job in jobs]
        room = _Room(self._limit)

        def run(job: Job[T]) -> T:
            with room.taken(job.cost):
                return job.run()

        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="convert")
        try:
            return [future.result() for future in [pool.submit(run, job) for job in jobs]]
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, nothing further begins


class _Room:
    """Bytes that are left to threads; whoever came first is served first."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._freed = threading.Condition()
        self._turn, self._next = 0, 0

    @contextmanager
    def taken(self, cost: int) -> Iterator[None]:
        with self._freed:
            ticket, self._next = self._next, self._next + 1
            self._freed.wait_for(
                lambda: ticket == self._turn and (not self._used or self._used + cost <= self._limit)
            )
            self._turn += 1
            self._used += cost
            self._freed.notify_all()
        try:
            yield
        finally:
            with self._freed:
                self._used -= cost
                self._freed.notify_all()

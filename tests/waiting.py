"""`wait_until`: the only way a test waits; `lives`: what it may ask of a process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


def wait_until(predicate: Callable[[], T | None], seconds: float, what: str, every: float = 0.02) -> T:
    """Return the first truthy value of `predicate`. Fails after `seconds`, naming `what` did not happen."""
    deadline = time.monotonic() + seconds
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(every)


def lives(process: psutil.Process) -> bool:
    """Whether it runs. A zombie does not: an orphan may end as a child of the tests, where nobody waits for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    return False

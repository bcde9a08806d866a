"""A wall clock that does not jump while the process lives: what deadlines are measured by and still can be shown."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds as of this process's start, plus what the monotonic clock has counted since.

    Setting the machine's clock makes no wait overdue, and none endless. Not for comparing with other processes' stamps.
    """
    return _BEGAN + time.monotonic()

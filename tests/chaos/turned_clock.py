"""Turns the wall clock of every Python process that imports this: by the seconds in the file `PYTHON_CLOCK_FILE`.

`storm.py` puts a copy on PYTHONPATH as `sitecustomize`, which Python imports at its start.

The monotonic clock goes on as it is. (libfaketime cannot do it here: with a monotonic clock that is left alone, its
release 0.9.10 answers absolute sleeps with EINVAL.)
"""

from __future__ import annotations

import os
import time

_FILE = os.environ.get("PYTHON_CLOCK_FILE", "")
_time, _time_ns = time.time, time.time_ns


def offset() -> int:
    """Seconds that the clock is ahead."""
    try:
        with open(_FILE) as file:
            return int(file.read() or 0)
    except OSError:
        return 0


if _FILE:
    time.time = lambda: _time() + offset()
    time.time_ns = lambda: _time_ns() + offset() * 1_000_000_000

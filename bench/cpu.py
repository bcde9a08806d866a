"""CPU seconds of an installation's processes, by the names that their launchers know them by."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import psutil

_FILES = ("stack.json", "jobs.json")  # of the supervisor's launcher and of the scheduler's


class Reading(msgspec.Struct, frozen=True):
    """CPU seconds used so far, when the job had made so many updates."""

    update: int
    seconds: dict[str, float]


def read(runs: Path) -> dict[str, float]:
    """Name ("redis", "errands", "trainer", "w0", ...) -> user and system seconds.

    Children count for their parent, but for those that have a name themselves.
    """
    pids: dict[str, int] = {}
    for name in _FILES:
        path = runs / "launch" / name
        records = json.loads(path.read_text())["processes"] if path.exists() else {}
        for full, known in records.items():
            if not known["dead"] and known["pid"]:
                pids[full.rpartition("/")[2]] = known["pid"]
    named = frozenset(pids.values())
    found = {name: _tree(pid, named - {pid}) for name, pid in pids.items()}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def per_update(readings: list[Reading]) -> dict[str, float]:
    """Name -> CPU seconds per update, from the first update to the last reading. Empty: too few readings."""
    if len(readings) < 2:
        return {}
    first, last = readings[0], readings[-1]
    both = first.seconds.keys() & last.seconds.keys()
    made = last.update - first.update
    return {name: (last.seconds[name] - first.seconds[name]) / made for name in sorted(both)}


def _tree(pid: int, others: frozenset[int]) -> float:
    """Seconds of a process, what it reaped, and its live descendants that are not `others`; 0: it is gone."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        own = float(times.user + times.system + times.children_user + times.children_system)
        children = [child.pid for child in process.children() if child.pid not in others]
    except psutil.NoSuchProcess:
        return 0.0
    return own + sum(_tree(child, others) for child in children)

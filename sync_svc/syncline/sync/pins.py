"""Versions that evaluations wait for: kept beyond retention until those have ended."""

from __future__ import annotations

from syncline.contract.events import TERMINAL_JOB_STATES
from syncline.contract.streams import JOB, PINS
from syncline.contract.version_path import VersionId, parse_version
from syncline.runtime.bus import Bus


def pinned(bus: Bus, job: str) -> set[VersionId]:
    """The versions of `job` that must stay; a pin whose evaluation has ended, or is unknown, is removed."""
    found = set()
    for name, version in bus.hgetall(PINS.at(job)).items():
        state = bus.hget(JOB.at(name.decode()), "state")
        if state is None or state.decode() in TERMINAL_JOB_STATES:
            bus.hdel(PINS.at(job), name)
        else:
            found.add(parse_version(version.decode()))
    return found

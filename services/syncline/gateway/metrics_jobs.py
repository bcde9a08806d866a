"""Which jobs a scrape shows: those that run, and for `RECENT` those that have ended. At most `MOST_JOBS`.

So the label `job_id` has at most so many values at a time, whatever the installation has seen; a job that is left out
is counted and not lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from syncline.contract.events import TERMINAL_JOB_STATES
from syncline.contract.streams import JOB, JOBS
from syncline.runtime.bus import Bus

RECENT = 900.0  # seconds after its end for which a job's last numbers stand
MOST_JOBS = 64


class Shown(msgspec.Struct, frozen=True):
    """`jobs`: to be shown, newest first. `states`: of all jobs that Redis knows. `left_out`: shown otherwise."""

    jobs: tuple[str, ...]
    states: dict[str, int]
    left_out: int


def shown(bus: Bus, now: float) -> Shown:
    """Of all jobs. `now`: wall-clock unix seconds."""
    known = [name.decode() for name in bus.zrange(JOBS.at(), reverse=True)]
    rows = bus.many([("HMGET", JOB.at(job), "state", "ended") for job in known]) if known else []
    return choose([(job, *_told(row)) for job, row in zip(known, rows, strict=True)], now)


def choose(jobs: Sequence[tuple[str, str, float | None]], now: float) -> Shown:
    """Of (job, state, ended), newest first. A job without a state has been forgotten. Pure."""
    states = Counter(state for _, state, _ in jobs if state)
    wanted = [job for job, state, ended in jobs if state and _is_live(state, ended, now)]
    live = {job for job, state, _ in jobs if state not in TERMINAL_JOB_STATES}
    first = sorted(wanted, key=lambda job: job not in live)  # those that run go before those that have ended
    return Shown(tuple(first[:MOST_JOBS]), dict(states), len(first[MOST_JOBS:]))


def _is_live(state: str, ended: float | None, now: float) -> bool:
    return state not in TERMINAL_JOB_STATES or (ended is not None and now - ended <= RECENT)


def _told(row: Sequence[bytes | None]) -> tuple[str, float | None]:
    state, ended = row
    return (state or b"").decode(), float(ended) if ended else None

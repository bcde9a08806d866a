"""How many rollout workers a disjoint job should have, from what was measured: a pure decision, and who measures.

A trainer that waits for batches while every worker is at work is starved: one worker more. Workers that stand idle at
the lag bound while the trainer never waits could be fewer: one less, if the others can do its work. Where a trainer
waits and workers are idle, too, something else is slow (rewards, the longest response), and no worker would help.

What keeps it from swinging: the two conditions lie so far apart that under a steady load the step back is never due;
both must hold several measurements in a row, all made since the last change; and each time that the direction turns,
the next change waits twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from syncline.contract.events import UpdateMetrics, WorkerStatus
from syncline.contract.job import JobSpec
from syncline.contract.streams import METRICS, WORKERS
from syncline.runtime.bus import Bus, unpack
from syncline.scheduler.saved import Size, Watch
from syncline.scheduler.stages import State, leaving, version_waits

STARVED = 0.15  # share of its time from which on a trainer that waits is starved
FULL = 0.8  # share of their time in which workers must run requests for another one to help
CALM = 0.05  # share of its time up to which a trainer does not wait
ROOMY = 0.85  # share of their time that the workers left would at most be busy
STEADY = 3  # newest measurements in a row that must agree
COOL = 4  # updates between two changes; twice as many for each time that the direction turned
MOST_TURNS = 5  # after which it doubles no more
SPAN = 4.0  # seconds that a measurement takes at least: workers tell twice a second


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, over whole updates: shares of its time."""

    waited: float  # in which the trainer waited for a batch
    busy: float  # in which a worker ran requests, the mean of all


def decide(
    shares: Sequence[Share], sizes: Sequence[Size], update: int, bounds: tuple[int, int], left: int
) -> int:
    """How many workers there should be: as many as now, one more, or one less.

    shares   measured with the present number of workers, oldest first
    sizes    the number at the beginning and after each change, with the update at which it came
    bounds   least and most
    left     updates to come
    """
    now, (least, most) = sizes[-1].workers, bounds
    rest = COOL << min(turns(sizes), MOST_TURNS)
    if len(shares) < STEADY or left <= COOL or (len(sizes) > 1 and update - sizes[-1].update < rest):
        return now
    recent = shares[-STEADY:]
    if now < most and all(one.waited > STARVED and one.busy > FULL for one in recent):
        return now + 1
    if now > least and all(one.waited < CALM and one.busy * now < ROOMY * (now - 1) for one in recent):
        return now - 1
    return now


def turns(sizes: Sequence[Size]) -> int:
    """How often the number of workers went the other way than before."""
    steps = [after.workers - before.workers for before, after in pairwise(sizes)]
    return sum((one > 0) != (next_ > 0) for one, next_ in pairwise(steps))


def rested(watch: Watch, update: int) -> bool:
    """Whether the pool was left alone for so long that what an update takes may be compared between modes."""
    return not watch.sizes or update - watch.sizes[-1].update >= COOL


def settled(state: State, watch: Watch) -> bool:
    """Whether nothing is under way that would be measured with the rest: a switch, a pause, somebody missing."""
    steady = state.stage == "flow" and state.wanted == state.mode and not state.paused
    return steady and not leaving(state) and not watch.awaited


class _Mark(msgspec.Struct, frozen=True):
    """Where a measurement began."""

    at: float  # wall-clock second at which the trainer had made an update
    workers: int
    told: Mapping[str, WorkerStatus]


class Scaler:
    """Measures one job and wishes for a number of workers. What it has measured is not kept, but measured anew."""

    def __init__(self, bus: Bus, job: str, spec: JobSpec, fixed: str) -> None:
        self._bus, self._job, self._spec = bus, job, spec
        self._idle = bool(fixed) or not spec.rollout.scales or spec.rollout.scaling == "request"
        self._cursor = "-"
        self._mark: _Mark | None = None
        self._waited = 0.0
        self._shares: list[Share] = []

    def wish(self, state: State, watch: Watch) -> int | None:
        """The number to change to. None: stay. Asked in every turn, and answers once per update."""
        if self._idle or state.minted is None:
            return None
        if not settled(state, watch):
            self._mark, self._shares = None, []
            return None
        if version_waits(state) or not self._measure(state.pool):
            return None
        rollout, update = self._spec.rollout, state.minted.number
        sizes = [Size(update=0, workers=rollout.workers), *watch.sizes]
        bounds, left = (rollout.least, rollout.most), state.updates - update
        wanted = decide(self._shares, sizes, update, bounds, left)
        return None if wanted == state.pool else wanted

    def _measure(self, workers: int) -> bool:
        """Go on measuring. True: an update was made since the last look."""
        made = self._bus.range(METRICS.at(self._job), self._cursor)
        if not made:
            return False
        self._cursor = f"({made[-1].id}"
        news = [unpack(entry, UpdateMetrics) for entry in made]
        now = _Mark(news[-1].at, workers, self._statuses())
        if self._mark is None or self._mark.workers != workers or now.at < self._mark.at:
            self._mark, self._waited, self._shares = now, 0.0, []
            return True
        self._waited += sum(one.waited for one in news)
        if now.at - self._mark.at >= SPAN:
            busy = busy_share(self._mark.told, now.told)
            if busy is not None:
                share = Share(waited=self._waited / (now.at - self._mark.at), busy=busy)
                self._shares = [*self._shares, share][-STEADY:]
            self._mark, self._waited = now, 0.0
        return True

    def _statuses(self) -> dict[str, WorkerStatus]:
        told = self._bus.hgetall(WORKERS.at(self._job))
        return {name.decode(): unpack(status, WorkerStatus) for name, status in told.items()}


def busy_share(before: Mapping[str, WorkerStatus], after: Mapping[str, WorkerStatus]) -> float | None:
    """Share of the time between in which workers ran requests, the mean of those that lived on; None: none did."""
    both = [(before[name], now) for name, now in after.items() if name in before]
    shares = [
        (now.busy - then.busy) / (now.at - then.at)
        for then, now in both
        if now.incarnation == then.incarnation and now.at > then.at
    ]
    return sum(shares) / len(shares) if shares else None

"""A job's curves, thinned so that a run of ten thousand updates is drawn from a few hundred points.

Each point stands for neighbouring updates and says their mean and their ends, so that an outlier stays to be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Response

from syncline.contract.diagnosis import Diagnostics
from syncline.contract.events import UpdateMetrics
from syncline.contract.streams import DIAGNOSTICS, METRICS, Key
from syncline.gateway.access import Gateway, Here, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.diagnosed import last_of_each
from syncline.gateway.errors import Refusal
from syncline.gateway.records import JobRecord
from syncline.gateway.reporter import evidence_of
from syncline.runtime.bus import unpack

router = APIRouter(prefix="/v1/jobs/{job}", tags=["progress"], dependencies=[Depends(only_known_parameters)])

MOST_POINTS = 1000
_PAGE = 2000
T = TypeVar("T")


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """What a number was over the updates of one point."""

    low: float
    mean: float
    high: float


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Updates `first` to `last`. None: no update of them has the number. Gaps are mean |difference| in nats."""

    first: int
    last: int
    reward: Range | None
    gap: Range | None  # trainer against the log-prob as sampled
    same_version_gap: Range | None  # the same over tokens of lag 0 alone
    mismatch: Range | None  # trainer against rollout at the same version, of probed trajectories
    staleness: Range | None  # rollout at the version updated against the log-prob as sampled, of the same
    lag: Range | None  # of the trained trajectories: mean of means, and the largest of any as `high`


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """A job's curves by update. `updates`: how many the points stand for."""

    updates: int
    baseline: float | None  # of the mean |mismatch|; None: not learned
    items: list[CurvePoint]


_ONE = Range(low=0.38, mean=0.41, high=0.45)
_SMALL = Range(low=3e-4, mean=4e-4, high=5e-4)
_EXAMPLE = Curves(
    updates=4,
    baseline=3.5e-4,
    items=[
        CurvePoint(
            first=9,
            last=12,
            reward=_ONE,
            gap=_SMALL,
            same_version_gap=_SMALL,
            mismatch=_SMALL,
            staleness=None,
            lag=Range(low=0.1, mean=0.2, high=1.0),
        )
    ],
)


@router.get("/curves", responses=describe(Curves, _EXAMPLE))
def curves(
    record: TheJob,
    here: Here,
    points: Annotated[int, Query(ge=1, le=MOST_POINTS, description="at most so many")] = 300,
) -> Response:
    """Reward, mismatch and lag by update, in at most `points` points."""
    metrics, diagnostics = _told(here, record)
    return reply(thinned(metrics, diagnostics, points))


def thinned(metrics: Iterable[UpdateMetrics], diagnostics: Iterable[Diagnostics], points: int) -> Curves:
    """At most `points` points; of an update that was made again after a resume the last telling counts."""
    last = {one.update: one for one in metrics}
    probed = {one.update: one for one in last_of_each(diagnostics)}
    updates = sorted(last)
    width = max(1, -(-len(updates) // points))
    items = [
        _point([last[update] for update in part], [probed[update] for update in part if update in probed])
        for part in (updates[i : i + width] for i in range(0, len(updates), width))
    ]
    known = [one.baseline for one in probed.values() if one.baseline is not None]
    return Curves(updates=len(updates), baseline=known[-1] if known else None, items=items)


def _point(made: Sequence[UpdateMetrics], probed: Sequence[Diagnostics]) -> CurvePoint:
    lag = _range(made, lambda one: one.lag_mean)
    return CurvePoint(
        first=made[0].update,
        last=made[-1].update,
        reward=_range(made, lambda one: one.reward),
        gap=_range(made, lambda one: one.gap_mean),
        same_version_gap=_range(made, lambda one: one.same_version_gap),
        mismatch=_range(probed, lambda one: _mean(one, "mismatch")),
        staleness=_range(probed, lambda one: _mean(one, "staleness")),
        lag=None if lag is None else msgspec.structs.replace(lag, high=float(max(m.lag_max for m in made))),
    )


def _mean(one: Diagnostics, term: str) -> float | None:
    tail = one.terms.get(term)
    return None if tail is None or not tail.count else tail.mean


def _range(made: Sequence[T], of: Callable[[T], float | None]) -> Range | None:
    found = [value for one in made if (value := of(one)) is not None and math.isfinite(value)]
    if not found:
        return None
    return Range(low=min(found), mean=math.fsum(found) / len(found), high=max(found))


def _told(here: Gateway, record: JobRecord) -> tuple[Iterable[UpdateMetrics], Iterable[Diagnostics]]:
    if record.recorded:
        return _all(here, METRICS, record.id, UpdateMetrics), _all(here, DIAGNOSTICS, record.id, Diagnostics)
    kept = evidence_of(here.bus, record, whole=False)
    if kept is None:
        raise Refusal(410, "gone", "Redis no longer knows this job and its folder has no record of this")
    return kept.metrics, kept.diagnostics


def _all(here: Gateway, key: Key, job: str, type: type[T]) -> list[T]:
    found: list[T] = []
    start = "-"
    while True:
        entries = here.bus.range(key.at(job), start, "+", _PAGE)
        found += [unpack(entry, type) for entry in entries]
        if len(entries) < _PAGE:
            return found
        start = f"({entries[-1].id}"

"""The pool's policy on a simulated fleet: the real machine and lag bound, among engines that take time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from sim_cases import Case, Fleet
from sim_scaling import Scaling

from syncline.scheduler.scaling import STARVED, turns

CASE = Case(
    name="small",
    source="none: made up",
    assumed="all of it",
    groups=16,
    members=4,
    median=1000,
    sigma=0.3,
    longest=4000,
    token=0.02,
    slots=16,
    fleets={"disjoint": Fleet(workers=2, train=20.0, publish=1.0, stage=2.0, commit=0.1)},
    max_lag=2,
)
"""Sampling takes about 85 worker-seconds an update: some 4 workers keep a trainer of 20 s at work."""


def steps(run: Scaling, since: int = 0) -> float:
    """Mean seconds of an update."""
    mints = run.mints[since:]
    return (mints[-1] - mints[0]) / (len(mints) - 1)


def test_a_starved_trainer_gets_workers_and_a_saturated_one_gives_them_back() -> None:
    """Training takes 20 s, and from update 60 on three times as long."""
    run = Scaling(CASE, 160, (1, 8), lambda update: 20.0 if update < 60 else 60.0, start=40.0)
    run.run()
    grown = max(size.workers for size in run.sizes)
    assert [size.workers for size in run.sizes[: grown - 1]] == list(range(2, grown + 1)), run.sizes
    assert grown in (4, 5, 6), run.sizes
    assert run.sizes[-1].workers in (2, 3), run.sizes
    assert turns(run.sizes) == 1, "it turns once, as the load did"
    assert max(run.lags) <= CASE.max_lag
    assert len(run.mints) == 161


def test_scaling_pays() -> None:
    """Against the two workers that it began with."""
    scaled = Scaling(CASE, 80, (1, 8), lambda update: 20.0, start=40.0)
    fixed = Scaling(CASE, 80, (2, 2), lambda update: 20.0, start=40.0)
    scaled.run()
    fixed.run()
    assert fixed.sizes == fixed.sizes[:1]
    assert steps(scaled, since=40) < 0.7 * steps(fixed, since=40)
    assert steps(scaled, since=40) < 20 / (1 - STARVED), (
        "what is left of waiting is less than calls for another"
    )

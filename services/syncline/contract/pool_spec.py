"""How many rollout workers a disjoint job may have while it runs; see docs/decisions/0022."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from syncline.contract.spec_part import Part

MOST = 1024  # workers of a job


class PoolSpec(Part):
    """The keys of `rollout` that say how large its pool is."""

    workers: int = Field(2, ge=1, le=MOST, description="rollout workers that the job begins with")
    workers_least: int | None = Field(
        None, ge=1, le=MOST, description="the fewest workers of a disjoint job that runs; null: `workers`"
    )
    workers_most: int | None = Field(
        None, ge=1, le=MOST, description="the most workers of a disjoint job that runs; null: `workers`"
    )
    scaling: Literal["measured", "request"] = Field(
        "measured",
        description="who changes the number of workers between its bounds. measured: the scheduler, by who waited for "
        "whom, and requests; request: requests alone",
    )

    @property
    def least(self) -> int:
        """The fewest workers."""
        return self.workers if self.workers_least is None else self.workers_least

    @property
    def most(self) -> int:
        """The most workers."""
        return self.workers if self.workers_most is None else self.workers_most

    @property
    def scales(self) -> bool:
        """Whether the number of workers may change at all."""
        return self.least < self.most


def contradictions(pool: PoolSpec, trains: bool, disjoint: bool) -> Iterator[tuple[str, str, str]]:
    """(key, message, hint) of each.

    trains     the job is no evaluation
    disjoint   `schedule` can bring the job into the mode disjoint, or lets a request do so
    """
    if pool.least > pool.workers:
        hint = f"use at most {pool.workers}, or more workers"
        yield "rollout.workers_least", f"{pool.least} is more than rollout.workers ({pool.workers})", hint
    if pool.most < pool.workers:
        hint = f"use at least {pool.workers}, or fewer workers"
        yield "rollout.workers_most", f"{pool.most} is less than rollout.workers ({pool.workers})", hint
    key = "rollout.workers_most" if pool.most > pool.workers else "rollout.workers_least"
    if pool.scales and not trains:
        yield key, "an evaluation's workers are all there from its beginning to its end", "leave it out"
    elif pool.scales and not disjoint:
        message = (
            "only a disjoint job's pool grows and shrinks, and schedule.max_lag 0 keeps this one colocated"
        )
        yield key, message, "leave it out, or set schedule.max_lag to at least 1"

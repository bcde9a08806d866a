"""`kill -9` of each service in turn: the run goes on or resumes, and ends with the same guarantees."""

from __future__ import annotations

import pytest
from guarantees import check
from specs import spec
from stack import Stack

VICTIMS = ("gateway", "w0", "errands", "scheduler", "trainer", "sync", "redis")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["colocated", "disjoint"])
def test_each_service_may_die(stack: Stack, mode: str) -> None:
    """One run in which every kind of process dies once, each at another update."""
    updates = 4 * (len(VICTIMS) + 1)
    job = stack.submit(spec(schedule={"mode": mode, "updates": updates}, limits={"worker_idle": 5.0}))
    dead = {}
    for number, victim in enumerate(VICTIMS):
        stack.wait_update(job, 3 + 4 * number, 180)
        dead[victim] = stack.kill(victim)
    status = stack.wait(job, 300)
    assert status["state"] == "succeeded", status
    assert len(set(dead.values())) == len(VICTIMS)
    check(stack.runs / job, stack.summary(job), updates, max_lag=1)

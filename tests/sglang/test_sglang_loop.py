"""Whole jobs over REST, SGLang with the torch trainer: recorded versions are true, and the server may die.

`test_with_megatron` shows the same in fewer jobs, and is what runs each time.
"""

from __future__ import annotations

from typing import Any

import pytest
from guarantees import check
from servers import kill_the_server
from specs import spec
from stack import Stack
from truth import every_span_is_true

pytestmark = pytest.mark.long
UPDATES = 10


def job_of(mode: str, in_flight: str, **schedule: Any) -> dict[str, Any]:
    return spec(
        model={"name": "tiny-moe"},
        optimizer={"lr": 1e-2},  # steps large enough to tell versions apart
        loss={"entropy": 0.1},
        sampling={"max_tokens": 48, "length": "lognormal", "length_median": 24, "length_sigma": 0.5},
        schedule={"mode": mode, "updates": UPDATES, "max_lag": 2, "in_flight": in_flight, **schedule},
        rollout={"engine": "sglang", "workers": 1},
        retention={"versions": 1000},
        limits={"activation_wait": 300.0, "worker_start": 300.0, "batch_wait": 600.0},
    )


@pytest.mark.timeout(900)
def test_every_recorded_version_is_true_and_the_server_may_be_killed(stack: Stack) -> None:
    job = stack.submit(job_of("disjoint", "in_place"))
    stack.wait_update(job, 3, 400)
    kill_the_server(stack)
    assert stack.wait(job, 600)["state"] == "succeeded"
    run = stack.runs / job
    check(run, stack.summary(job), UPDATES, max_lag=2)
    records = every_span_is_true(run)
    several = [t for t in records if len(t.spans) > 1]
    assert several, "no trajectory crossed a commit: the test shows nothing"
    assert all(t.expert_ids is not None for t in records)


@pytest.mark.timeout(900)
def test_a_job_that_shares_its_device_and_changes_its_mode(stack: Stack) -> None:
    """With a cut, whose mask is recorded and trained over; versions come by broadcast."""
    switch = {"switches": [{"at_update": 5, "mode": "disjoint"}]}
    asked = job_of("colocated", "drain", **switch)
    asked["sampling"] |= {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "record_mask": True}
    asked["loss"]["correction"] = {"kind": "truncate", "low": 0.5, "high": 2.0}
    asked["rollout"]["sglang"] = {"update": "group"}
    job = stack.submit(asked)
    assert stack.wait(job, 600)["state"] == "succeeded"
    run = stack.runs / job
    check(run, stack.summary(job), UPDATES, max_lag=2)
    records = every_span_is_true(run)
    assert all(len(t.spans) == 1 for t in records), "drain puts one version into a trajectory"
    assert all(t.mask is not None and max(t.mask.sizes) <= 40 for t in records)

"""Whole jobs over REST: the reference rollout, and a Megatron trainer of two ranks that replays recorded routes."""

from __future__ import annotations

import pytest
from guarantees import check
from specs import spec
from stack import Stack

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"dp": 2, "ep": 2}], ids=["tp2", "ep2"])
@pytest.mark.parametrize("mode", ["colocated", "disjoint"])
def test_a_job_trains_on_two_ranks_and_its_trainer_may_die(
    stack: Stack, parallel: dict[str, int], mode: str
) -> None:
    updates = 6
    job = stack.submit(
        spec(
            model={"name": "tiny-moe"},
            optimizer={"lr": 3e-4},
            schedule={"mode": mode, "updates": updates, "max_lag": 2},
            checkpoint={"every": 2},
            trainer={"engine": "megatron", "parallel": parallel, "router_replay": True},
        )
    )
    stack.wait_update(job, 3, 200)
    stack.kill("trainer")
    assert stack.wait(job, 300)["state"] == "succeeded"
    check(stack.runs / job, stack.summary(job), updates, max_lag=2)
    metrics = stack.get(f"/v1/jobs/{job}/metrics")["items"]
    assert len(metrics) == updates
    for update in metrics:
        if update["lag_max"] == 0:
            assert min(update["route_agreement"]) >= 0.999, "both sides hold one version"

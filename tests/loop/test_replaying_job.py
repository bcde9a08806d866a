"""A whole job whose trainer replays the routes of its rollout, across a worker's records, segments and a resume."""

from __future__ import annotations

import pytest
from guarantees import check, segment_files
from specs import spec
from stack import Stack

from syncline.runtime import segments


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_replays_its_routes_and_reports_how_far_they_agree(stack: Stack) -> None:
    updates = 6
    job = stack.submit(
        spec(
            model={"name": "tiny-moe"},
            optimizer={"lr": 3e-4},  # larger steps leave few routes as they were two versions ago
            schedule={"mode": "disjoint", "updates": updates, "max_lag": 2, "in_flight": "in_place"},
            checkpoint={"every": 2},
            trainer={"router_replay": True},
        )
    )
    stack.wait_update(job, 3, 120)
    stack.kill("trainer")
    assert stack.wait(job, 300)["state"] == "succeeded"
    check(stack.runs / job, stack.summary(job), updates, max_lag=2)
    metrics = stack.get(f"/v1/jobs/{job}/metrics")["items"]
    files = [segments.read(path) for path in segment_files(stack.runs / job)]
    assert len(metrics) == len(files) == updates
    for update, segment in zip(metrics, files, strict=True):
        fed = sum(len(row.trajectory.tokens) - 1 for row in segment.rows)
        shares = update["route_agreement"]
        assert len(shares) == 2
        assert 0.3 < min(shares) <= max(shares) <= 1
        assert sum(update["route_diverged"]) <= fed
        assert (1 - min(shares)) * fed <= sum(update["route_diverged"]) + 1e-6
        if update["lag_max"] == 0:
            assert min(shares) >= 0.999, "both sides hold one version"
    assert metrics[0]["lag_max"] == 0
    assert min(min(update["route_agreement"]) for update in metrics) < 0.999, "the trainer moved no route"

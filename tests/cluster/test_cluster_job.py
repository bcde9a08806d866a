"""Jobs in a real control plane, their pods played by a kubelet that starts the real processes."""

from __future__ import annotations

import pytest
from guarantees import check
from rig import Rig
from specs import spec

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_job_runs_in_one_shared_pod(rig: Rig) -> None:
    rig.install()
    job = rig.post("/v1/jobs", spec(schedule={"mode": "colocated", "updates": 4}))["id"]
    rig.wait(job, 300, "update 1", lambda status: int(status["update"]) >= 1)
    assert rig.pools(job) == ["shared", "sync"]
    rig.wait(job, 300, "the end", lambda status: status["state"] == "succeeded")
    check(rig.runs / job, rig.summary(job), 4, max_lag=1)

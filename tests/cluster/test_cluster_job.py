"""Jobs in a real control plane, their pods played by a kubelet that starts the real processes."""

from __future__ import annotations

import pytest
from guarantees import check
from rig import Rig
from specs import spec
from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_job_runs_in_one_shared_pod(rig: Rig) -> None:
    rig.install()
    job = rig.post("/v1/jobs", spec(schedule={"mode": "colocated", "updates": 4}))["id"]
    rig.wait(job, 300, "update 1", lambda status: int(status["update"]) >= 1)
    assert rig.pools(job) == ["shared", "sync"]
    rig.wait(job, 300, "the end", lambda status: status["state"] == "succeeded")
    check(rig.runs / job, rig.summary(job), 4, max_lag=1)


def test_a_job_outlives_switches_kills_evictions_and_its_scheduler(rig: Rig) -> None:
    """Two switches of mode on the live job; in between every kind of death that a cluster knows."""
    updates = 24
    rig.install()
    job = rig.post(
        "/v1/jobs", spec(schedule={"mode": "colocated", "updates": updates}, limits={"worker_idle": 5.0})
    )["id"]

    rig.wait(job, 300, "update 2", lambda status: int(status["update"]) >= 2)
    rig.run(f"{job}-shared").kill()  # both engines at once
    rig.wait(job, 300, "update 4", lambda status: int(status["update"]) >= 4)

    switch(rig, job, "disjoint", ["rollout", "sync", "trainer"])
    before = int(rig.status(job)["update"])
    rig.run(f"{job}-rollout-0").kill()
    rig.wait(job, 300, "an update without w0", lambda status: int(status["update"]) >= before + 2)
    rig.evict(rig.run(f"{job}-trainer-0").name)
    rig.evict(rig.run(f"{job}-rollout-1").name)
    rig.run("f-scheduler").kill()
    rig.wait(job, 300, "an update after evictions", lambda status: int(status["update"]) >= before + 5)

    switch(rig, job, "colocated", ["shared", "sync"])
    rig.evict(rig.run(f"{job}-sync").name)
    status = rig.wait(job, 400, "the end", lambda status: status["state"] == "succeeded")
    assert status["mode"] == "colocated"
    check(rig.runs / job, rig.summary(job), updates, max_lag=1)
    wait_until(lambda: not rig.pods(f"syncline.dev/job={job}"), 60, "the job's pods are gone")
    wait_until(lambda: not owned(rig, job), 60, "nothing of the job is left")
    slow = [end for end in rig.kubelet.ended if end["killed"]]
    assert not slow, f"processes that did not end within the grace: {slow}"


def switch(rig: Rig, job: str, mode: str, pools: list[str]) -> None:
    """Ask for the mode, and wait until the engines have moved and an update was made there."""
    rig.post(f"/v1/jobs/{job}/mode", {"mode": mode})
    rig.wait(job, 300, f"mode {mode}", lambda status: status["mode"] == mode)
    wait_until(lambda: rig.pools(job) == pools, 120, f"pools {pools}", every=0.2)
    now = int(rig.status(job)["update"])
    rig.wait(job, 300, f"an update in mode {mode}", lambda status: int(status["update"]) > now)


def owned(rig: Rig, job: str) -> list[str]:
    """Names of what is left of the job."""
    kinds = [
        rig.at("configmaps"),
        rig.at("services"),
        rig.at("statefulsets", "apps"),
        rig.at("deployments", "apps"),
    ]
    found = [body for path in kinds for body in rig.rest.items(path, labelSelector=f"syncline.dev/job={job}")]
    return [str(body["metadata"]["name"]) for body in found]

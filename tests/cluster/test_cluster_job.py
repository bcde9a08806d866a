"""Jobs in a real control plane, their pods played by a kubelet that starts the real processes."""

from __future__ import annotations

import sqlite3

import pytest
from guarantees import check
from rig import Rig
from specs import spec
from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]


def test_a_job_runs_in_one_shared_pod(rig: Rig) -> None:
    rig.install()
    job = rig.post("/v1/jobs", spec(schedule={"mode": "colocated", "updates": 4}))["id"]
    rig.wait(job, 300, "update 1", lambda status: int(status["update"]) >= 1)
    assert rig.pools(job) == ["shared", "sync"]
    rig.wait(job, 300, "the end", lambda status: status["state"] == "succeeded")
    check(rig.runs / job, rig.summary(job), 4, max_lag=1)
    wait_until(lambda: not rig.pods(f"syncline.dev/job={job}"), 60, "the job's pods are gone")
    assert rig.spans_lost(job) == []
    (store,) = (rig.folder / "pods").glob(f"{job}-shared-0-*/volumes/cache/traces.sqlite")
    with sqlite3.connect(store) as spans:
        named = {name for (name,) in spans.execute("select distinct name from spans")}
    assert {"sampled", "published", "trained", "minted"} <= {name.rpartition(".")[2] for name in named}, named


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

    rig.switch(job, "disjoint", ["rollout", "sync", "trainer"])
    before = int(rig.status(job)["update"])
    rig.run(f"{job}-rollout-0").kill()
    rig.wait(job, 300, "an update without w0", lambda status: int(status["update"]) >= before + 2)
    rig.evict(rig.run(f"{job}-trainer-0").name)
    rig.evict(rig.run(f"{job}-rollout-1").name)
    rig.run("f-scheduler").kill()
    rig.wait(job, 300, "an update after evictions", lambda status: int(status["update"]) >= before + 5)

    rig.switch(job, "colocated", ["shared", "sync"])
    rig.evict(rig.run(f"{job}-sync").name)
    status = rig.wait(job, 400, "the end", lambda status: status["state"] == "succeeded")
    assert status["mode"] == "colocated"
    check(rig.runs / job, rig.summary(job), updates, max_lag=1)
    wait_until(lambda: not rig.pods(f"syncline.dev/job={job}"), 60, "the job's pods are gone")
    wait_until(lambda: not rig.owned(job), 60, "nothing of the job is left")
    assert rig.spans_lost(job) == []
    slow = [end for end in rig.kubelet.ended if end["killed"]]
    assert not slow, f"processes that did not end within the grace: {slow}"

"""Jobs in a real control plane, their pods played by a kubelet that starts the real processes."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from guarantees import check
from rig import Rig
from specs import spec
from waiting import wait_until

from syncline.contract.token_path import TOKEN_PATH
from syncline.contract.version_path import VERSION_PATH

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
    assert not list((rig.folder / "pods").glob(f"{job}-*/volumes/cache/traces.sqlite"))
    seen_whole(rig, job)


def seen_whole(rig: Rig, job: str) -> None:
    """Without a collector the gateway shows a token's and a version's whole path, each hop by its own span."""
    (trained,) = rig.get(f"/v1/jobs/{job}/trajectories?state=trained&update=3&limit=1")["items"]
    name = trained["trajectory"]
    path = rig.get(f"/v1/jobs/{job}/trajectories/{name}/tokens/0")
    assert path["missing"] == []
    assert [hop["hop"] for hop in path["hops"]] == [hop.name for hop in TOKEN_PATH]
    assert {hop["source"] for hop in path["hops"]} == {"span"}
    assert {hop["service"] for hop in path["hops"]} == {"scheduler", "rollout", "errands", "trainer"}

    version = rig.get(f"/v1/jobs/{job}/versions/{path['version']['record']['version']}")
    assert {hop["source"] for hop in version["path"]} == {"span"}
    hops = {hop["hop"] for hop in version["path"]}
    assert {hop.name for hop in VERSION_PATH} - hops <= {"version.retired"}
    assert {hop["service"] for hop in version["path"]} == {"trainer", "sync", "rollout"}

    query = urlencode({"q": f'{{ span.trajectory = "{name}" }}'})
    (found,) = rig.get(f"/tempo/api/search?{query}")["traces"]
    assert (found["rootServiceName"], found["rootTraceName"]) == ("scheduler", "token.prompted")
    batches = rig.get(f"/tempo/api/traces/{found['traceID']}")["batches"]
    told = {span["name"] for batch in batches for scope in batch["scopeSpans"] for span in scope["spans"]}
    assert told == {hop.name for hop in TOKEN_PATH}


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

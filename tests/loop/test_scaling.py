"""A disjoint job whose pool grows and shrinks by REST while it runs: nothing is lost and nothing used twice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from guarantees import check
from specs import spec
from stack import Stack
from waiting import wait_until

UPDATES = 60


def scale(stack: Stack, job: str, workers: int) -> Any:
    return stack.http.post(f"{stack.url}/v1/jobs/{job}/workers", json={"workers": workers})


def verb(stack: Stack, job: str, asked: str) -> None:
    assert stack.http.post(f"{stack.url}/v1/jobs/{job}/{asked}").status_code == 202


def serving(stack: Stack, job: str) -> dict[str, dict[str, Any]]:
    return {w["worker"]: w for w in stack.get(f"/v1/jobs/{job}/workers")["items"] if w["state"] == "serving"}


@pytest.mark.timeout(400)
def test_a_pool_grows_and_shrinks_while_the_job_runs(stack: Stack) -> None:
    job = stack.submit(
        spec(
            schedule={"mode": "disjoint", "updates": UPDATES, "max_lag": 2},
            rollout={"workers": 1, "workers_most": 2, "scaling": "request", "pace": [0.4, 0.4]},
            checkpoint={"every": 30},
        )
    )
    stack.wait_update(job, 1, 90)
    assert stack.status(job)["pool"] == {
        "workers": 1,
        "least": 1,
        "most": 2,
        "coming": [],
        "leaving": [],
        "why": "",
        "fixed": "",
    }
    refused = scale(stack, job, 3)
    assert refused.status_code == 422
    assert "3 is not between 1 (least) and 2 (most)" in refused.json()["detail"]

    said = stack.cli("scale", job, "2")
    assert said.returncode == 0, said.stderr
    wait_until(lambda: stack.status(job)["pool"]["workers"] == 2, 60, "the order")
    verb(stack, job, "pause")  # a process may take longer to start than the job has left
    wait_until(lambda: not stack.status(job)["pool"]["coming"], 150, "w1 to report for duty")
    verb(stack, job, "resume")
    grown = wait_until(lambda: serving(stack, job).get("w1"), 90, "w1 to serve")
    assert grown["version"] is not None, "a newcomer takes work with a proven version alone"
    wait_until(lambda: serving(stack, job)["w1"]["tokens"] > 0, 60, "w1 to sample")

    assert scale(stack, job, 1).status_code == 202
    wait_until(lambda: not stack.status(job)["pool"]["leaving"] and not stack.pid("w1"), 60, "w1 to leave")
    status = stack.wait(job, 120)
    assert status["state"] == "succeeded", status
    assert status["pool"]["workers"] == 1
    check(stack.runs / job, stack.summary(job), UPDATES, max_lag=2)
    told = [phase["workers"] for phase in stack.get(f"/v1/jobs/{job}/phases")["items"]]
    assert [after for before, after in pairwise([0, *told]) if after != before] == [1, 2, 1]

"""Both gates of the ladder in a whole stack, whose engines keep a tensor of the version before in version 2.

A job that demands levels 1 to 5 starts once they hold, and samples under each version that passes level 6; one whose
contract is short of a baseline is refused by name. The validator dies once on the way, in one mode the scheduler too.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from guarantees import check, sampled_under
from specs import spec
from stack import Stack
from waiting import wait_until

from syncline.contract.recipes import RECIPES
from syncline.runtime.tracing import read_trace

STALE = Path(__file__).parent / "stale"
FIVE = [1, 2, 3, 4, 5]
UPDATES = 4


@pytest.fixture
def stale() -> Iterator[Stack]:
    """A stack whose engines have the defect."""
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    path = os.pathsep.join(filter(None, (str(STALE), os.environ.get("PYTHONPATH"))))
    started = Stack(runs, {"PYTHONPATH": path})
    try:
        started.up()
        yield started
    finally:
        started.down()
        shutil.rmtree(runs, ignore_errors=True)


def without_baseline() -> dict[str, Any]:
    """A contract that says everything but the gap that it expects, so that a gap could not be told from a fault."""
    changed = msgspec.structs.replace(
        RECIPES["unified_fp8"], name="no_baseline", expected=type(RECIPES["bf16"].expected)()
    )
    told: dict[str, Any] = json.loads(msgspec.json.encode(changed))
    return told


def validations(stack: Stack, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.get(f"/v1/jobs/{job}/validation")["items"]
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["disjoint", pytest.param("colocated", marks=pytest.mark.long)])
def test_a_job_starts_and_a_version_is_active_once_their_levels_hold_and_not_before(
    stale: Stack, mode: str
) -> None:
    wanted = spec(
        optimizer={"lr": 1e-6},  # the stale tensor stays within what a worker's own prefixes can see
        schedule={"mode": mode, "updates": UPDATES},
        validation={"before_start": FIVE, "before_active": [6]},
    )
    good = stale.submit(wanted)
    bad = stale.submit(spec(precision={"custom": without_baseline()}, validation={"before_start": FIVE}))
    climbs_and_says_so(stale, good, killing=mode == "colocated")
    stale.kill("validator")
    status = stale.wait(good, 400)
    assert status["state"] == "succeeded", status
    assert "version 0.2 is not active and never will be, 0.1 serves on" in status["alarm"]
    check(stale.runs / good, stale.summary(good), UPDATES, max_lag=1)
    version_2_is_refused(stale, good)
    refused_by_name(stale, bad)


def climbs_and_says_so(stack: Stack, job: str, killing: bool) -> None:
    """Until levels 1 to 5 hold. `killing`: the scheduler dies meanwhile; its successor finds climb and process."""
    climbing = wait_until(lambda: stack.pid("validation"), 60, "the process that climbs")
    status = wait_until(
        lambda: (now := stack.status(job))["state"] == "validating" and now, 60, "the word that it is"
    )
    assert [(w["name"], w["owner"]) for w in status["waits"]] == [("validation", "validation")]
    assert status["waits"][0]["deadline"] == pytest.approx(status["waits"][0]["since"] + 900)
    assert "of 1, 2, 3, 4, 5" in status["waits"][0]["detail"]
    assert stack.pid("trainer") is None, "nothing of the job runs yet"
    if killing:
        stack.kill("scheduler")
        assert stack.pid("validation") in (climbing, None)
    wait_until(lambda: stack.pid("validator"), 120, "the job to start")
    [view] = [one for one in validations(stack, job) if one["why"] == "before_start"]
    assert (view["state"], view["number"]) == ("holds", 1)
    assert [result["level"] for result in view["results"]] == FIVE


def version_2_is_refused(stack: Stack, job: str) -> None:
    """It was never active, nothing was sampled under it, and what a worker checks by itself found nothing."""
    records = {r["version"]: r for r in stack.get(f"/v1/jobs/{job}/versions")["items"]}
    refused = records["0.2"]
    assert (refused["state"], refused["active"]) == ("failed", None)
    assert "level 6 (live update) fails: warm equals cold" in refused["reason"]
    assert all(worker["active"] is None for worker in refused["workers"].values())
    assert any(worker["verified"] for worker in refused["workers"].values())
    assert all(records[f"0.{n}"]["active"] for n in (0, 1, 3, 4)), "the next one has its own chance"
    assert 2 not in sampled_under(stack.runs / job)
    proofs = [view for view in validations(stack, job) if view["why"] == "before_active"]
    told = {view["version"]: view for view in proofs if view["state"] != "interrupted"}
    states = {version: view["state"] for version, view in told.items()}
    assert states == {f"0.{n}": "fails" if n == 2 else "holds" for n in range(UPDATES + 1)}
    evidence = told["0.2"]["evidence"]
    assert f"figures: {evidence}" in refused["reason"]
    assert (stack.runs / evidence / "evidence" / "level-6.json").is_file()
    trace = read_trace(stack.runs / "traces.sqlite", refused["traceparent"].split("-")[1])
    assert {span.name for span in trace} >= {"version.minted", "validation.climbed", "validation.level"}


def refused_by_name(stack: Stack, job: str) -> None:
    """The job whose contract is short of something ends with the boundary, the diagnosis and the figures."""
    status = stack.wait(job, 120)
    assert status["state"] == "failed"
    for words in ("validation: level 1 (precision contract) fails", "expected.high", "likely", "look at"):
        assert words in status["reason"], status["reason"]
    [view] = validations(stack, job)
    assert (view["state"], view["failed_at"]) == ("fails", 1)
    assert f"figures: {view['evidence']}" in status["reason"]
    evidence = stack.runs / view["evidence"]
    assert (evidence / view["results"][0]["evidence"]).is_file()
    assert "Level 1 fails" in (evidence / "validation.html").read_text()
    assert not (stack.runs / job / "logs" / "trainer.log").exists(), "no engine was ever started"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_is_cancelled_while_its_levels_are_climbed(stack: Stack) -> None:
    job = stack.submit(spec(validation={"before_start": FIVE}))
    wait_until(lambda: stack.status(job)["state"] == "validating", 60, "the climb to begin")
    assert stack.http.post(f"{stack.url}/v1/jobs/{job}/cancel").status_code == 202
    assert stack.wait(job, 60)["state"] == "cancelled"
    assert stack.pid("validation") is None

"""Gates before a job's start, in a whole stack: levels hold and it runs, a level fails and it does not, by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from specs import spec
from stack import Stack
from waiting import wait_until

from syncline.contract.recipes import RECIPES

FIVE = [1, 2, 3, 4, 5]


def without_baseline() -> dict[str, Any]:
    """A contract that says everything but the gap that it expects, so that a gap could not be told from a fault."""
    changed = msgspec.structs.replace(
        RECIPES["unified_fp8"], name="no_baseline", expected=type(RECIPES["bf16"].expected)()
    )
    told: dict[str, Any] = json.loads(msgspec.json.encode(changed))
    return told


def validation(stack: Stack, job: str) -> dict[str, Any] | None:
    """The job's only validation, once there is one."""
    items = stack.get(f"/v1/jobs/{job}/validation")["items"]
    assert len(items) <= 1
    return items[0] if items else None


@pytest.mark.timeout(600)
def test_a_job_starts_once_its_levels_hold_and_not_before(stack: Stack) -> None:
    """The scheduler dies while the levels are climbed: its successor finds the same climb and the same process."""
    good = stack.submit(spec(schedule={"updates": 2}, validation={"before_start": FIVE}))
    bad = stack.submit(spec(precision={"custom": without_baseline()}, validation={"before_start": FIVE}))
    climbing = wait_until(lambda: stack.pid("validation"), 60, "the process that climbs")
    status = wait_until(
        lambda: (now := stack.status(good))["state"] == "validating" and now, 60, "the word that it is"
    )
    assert [(w["name"], w["owner"]) for w in status["waits"]] == [("validation", "validation")]
    assert status["waits"][0]["deadline"] == pytest.approx(status["waits"][0]["since"] + 900)
    assert "of 1, 2, 3, 4, 5" in status["waits"][0]["detail"]
    assert stack.pid("trainer") is None, "nothing of the job runs yet"
    stack.kill("scheduler")
    assert stack.pid("validation") in (climbing, None)
    status = stack.wait(good, 300)
    assert status["state"] == "succeeded", status
    view = validation(stack, good)
    assert view is not None
    assert (view["why"], view["state"], view["number"]) == ("before_start", "holds", 1)
    assert [result["level"] for result in view["results"]] == FIVE
    starts = json.loads((stack.runs / "launch" / "jobs.json").read_text())
    assert f"{good}/validation" not in starts["processes"]
    assert status["started"] < view["began"]

    status = stack.wait(bad, 120)
    assert status["state"] == "failed"
    for words in ("validation: level 1 (precision contract) fails", "expected.high", "likely", "look at"):
        assert words in status["reason"], status["reason"]
    view = validation(stack, bad)
    assert view is not None
    assert (view["state"], view["failed_at"]) == ("fails", 1)
    assert f"figures: {view['evidence']}" in status["reason"]
    evidence = stack.runs / view["evidence"]
    assert (evidence / view["results"][0]["evidence"]).is_file()
    assert "Level 1 fails" in (evidence / "validation.html").read_text()
    assert not (stack.runs / bad / "logs" / "trainer.log").exists(), "no engine was ever started"


@pytest.mark.timeout(300)
def test_a_job_is_cancelled_while_its_levels_are_climbed(stack: Stack) -> None:
    job = stack.submit(spec(validation={"before_start": FIVE}))
    wait_until(lambda: stack.status(job)["state"] == "validating", 60, "the climb to begin")
    assert stack.http.post(f"{stack.url}/v1/jobs/{job}/cancel").status_code == 202
    assert stack.wait(job, 60)["state"] == "cancelled"
    assert stack.pid("validation") is None

"""The gate before a job's start: a scheduler process, and a stand-in that climbs."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest
from climber import GO
from installation import Installation
from waiting import lives, wait_until

from syncline.contract import events as e
from syncline.runtime import validations


def climbs(here: Installation, job: str, does: str, wait: float = 60.0) -> psutil.Process:
    """Submit a job that must pass levels 1 and 2; what climbs."""
    here.submit(job, name=does, spec={"validation": {"before_start": [1, 2], "wait": wait}})
    wait_until(lambda: here.field(job, "state") == "validating", 30, "the climb")
    return psutil.Process(wait_until(lambda: process_of(here, job), 30, "the process that climbs"))


def process_of(here: Installation, job: str) -> int | None:
    known = json.loads((here.runs / "launch" / "jobs.json").read_text())["processes"]
    found = known.get(f"{job}/validation")
    return None if found is None or found["dead"] else int(found["pid"])


def go(here: Installation, job: str) -> None:
    (validations.folder_of(here.runs / job, 1) / GO).touch()


def refused(here: Installation, job: str) -> str:
    """Why the job failed. None of its engines ever ran."""
    assert here.ended(job) == "failed"
    assert not list((here.runs / job / "logs").glob("w0.log"))
    assert [type(event) for event in here.events(job)][:1] == [e.Failed]
    assert here.field(job, "waits") == "[]"
    return here.field(job, "reason")


def test_levels_that_hold_let_the_job_start_and_a_killed_scheduler_finds_the_climb(
    here: Installation, job: str
) -> None:
    climb = climbs(here, job, "holds")

    def far() -> list[dict[str, Any]]:
        return [w for w in json.loads(here.field(job, "waits") or "[]") if "climbs level 2" in w["detail"]]

    wait = wait_until(far, 30, "how far it is")[0]
    assert (wait["name"], wait["owner"]) == ("validation", "validation")
    assert wait["deadline"] == pytest.approx(wait["since"] + 60)
    assert "validation 1 climbs level 2 (quantizer and converter) of 1, 2; 1 hold" in wait["detail"]
    here.replace()
    wait_until(lambda: here.scheduler is not None and process_of(here, job) == climb.pid, 30, "its adoption")
    go(here, job)
    here.check(job)
    assert validations.numbers(here.runs / job) == [1]
    assert not lives(climb)


def test_a_level_that_fails_ends_the_job_by_its_name(here: Installation, job: str) -> None:
    climbs(here, job, "fails")
    go(here, job)
    reason = refused(here, job)
    assert reason.startswith(
        "validation: level 2 (quantizer and converter) fails: a figure: 2, at most 1 (a test)"
    )
    assert f"figures: {job}/validations/1" in reason


@pytest.mark.parametrize(
    ("does", "says"),
    [("breaks", "validation 1 is broken: there is no such model"), ("dies", "its process ended 3")],
)
def test_what_cannot_be_climbed_is_no_pass(here: Installation, job: str, does: str, says: str) -> None:
    here.submit(job, name=does, spec={"validation": {"before_start": [1, 2]}})
    wait_until(lambda: (here.runs / job / "validations" / "1").exists(), 30, "the climb")
    go(here, job)
    assert says in refused(here, job)


def test_a_climb_that_takes_too_long_or_is_stopped_is_no_pass(here: Installation, job: str) -> None:
    climb = climbs(here, job, "holds", wait=1.5)
    assert "not over after 1.5 s" in refused(here, job)
    assert not lives(climb)
    other = f"j{'f' * 10}"
    climbs(here, other, "holds")
    validations.cancel(here.runs / other, 1)
    assert "validation 1 is cancelled" in refused(here, other)


def test_a_job_is_cancelled_while_it_is_validated_and_others_wait_for_it(
    here: Installation, job: str
) -> None:
    climb = climbs(here, job, "holds")
    second = f"j{'e' * 10}"
    here.submit(second, updates=1)
    wait_until(lambda: job in here.field(second, "reason"), 30, "why the second one waits")
    here.ask(job, "pause")
    here.ask(job, "cancel")
    assert here.ended(job) == "cancelled"
    assert not lives(climb)
    assert here.ended(second) == "succeeded"

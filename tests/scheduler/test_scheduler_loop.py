"""The scheduler as a real process over a real Redis, with stand-ins for the services of a job."""

from __future__ import annotations

import json
import os
import signal
import stat
from itertools import pairwise

import pytest
from installation import Installation
from waiting import wait_until

from syncline.contract import events as e
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVENTS, JOB, JOBS, LOCK
from syncline.contract.token_path import trajectory_id
from syncline.runtime.ledger import Ledger


@pytest.mark.parametrize("mode", ["colocated", "disjoint"])
def test_a_job_runs_to_its_end(here: Installation, job: str, mode: str) -> None:
    here.submit(job, mode=mode)
    here.check(job)
    folder = here.runs / job
    assert JobSpec.model_validate_json((folder / "spec.json").read_text()).hash() == here.field(
        job, "spec_hash"
    )
    assert len((folder / "key").read_bytes()) == 32
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert here.field(job, "mode") == mode
    names = {p.phase for p in here.phases(job)}
    assert names >= ({"flow"} if mode == "disjoint" else {"sample", "drain", "train", "sync"})
    assert float(here.field(job, "started")) <= float(here.field(job, "ended"))


def test_what_is_sampled_beyond_a_batch_is_used_by_the_next_update(here: Installation, job: str) -> None:
    here.submit(job, spec={"prompts": {"oversample": 1.5}}, updates=5)
    here.check(job, 5)
    ledger = Ledger(here.bus, job, batch_groups=2, max_lag=1, policy="wait", max_attempts=5)
    names = [trajectory_id(job, group, 0) for group in range(ledger.counts()["submitted"] // 2)]
    lines = ledger.entries(names).values()
    lags = [line.update - 1 - line.version.number for line in lines if line.update and line.version]
    assert max(lags) == 1, "nothing was ever left over"
    told = json.loads(here.field(job, "prompts"))["sources"][0]
    assert (told["trained"], told["drawn"] - told["unused"], told["open"]) == (10, 10, 0)
    assert told["unused"] <= 1


def test_the_plan_and_a_request_switch_the_mode_there_and_back(here: Installation, job: str) -> None:
    here.submit(job, updates=12, switches=[{"at_update": 3, "mode": "disjoint"}])
    here.reached(job, 5)
    here.ask(job, "switch", "colocated")
    here.check(job, 12)
    modes = [p.mode for p in here.phases(job)]
    changes = [(a, b) for a, b in pairwise(modes) if a != b]
    assert changes == [("colocated", "disjoint"), ("disjoint", "colocated")]
    first = next(p for p in here.phases(job) if p.mode == "disjoint")
    assert first.update >= 3
    switches = [event.why for event in here.events(job) if isinstance(event, e.SwitchTo)]
    assert switches == ["plan", "request"]


@pytest.mark.parametrize("mode", ["colocated", "disjoint"])
def test_a_killed_scheduler_goes_on_where_it_was(here: Installation, job: str, mode: str) -> None:
    here.submit(job, updates=6, mode=mode)
    here.reached(job, 2)
    here.kill()
    here.start()
    here.check(job, 6)


@pytest.mark.parametrize("victim", ["w0", "trainer", "sync"])
def test_a_killed_process_is_replaced_and_nothing_is_lost(here: Installation, job: str, victim: str) -> None:
    here.submit(job, updates=6)
    here.reached(job, 2)
    state = json.loads((here.runs / "launch" / "jobs.json").read_text())
    os.kill(state["processes"][f"{job}/{victim}"]["pid"], signal.SIGKILL)
    here.check(job, 6)
    assert victim in {event.who for event in here.events(job) if isinstance(event, e.WorkerLost)}


def test_an_alarm_is_told_of_the_job_and_changes_nothing(here: Installation, job: str) -> None:
    here.submit(job, updates=6)
    here.reached(job, 1)
    here.bus.append(EVENTS.at(job), e.Alarm(who="trainer", update=1, what="mismatch: mean 1"))
    wait_until(lambda: here.field(job, "alarm"), 20, "the alarm")
    assert here.field(job, "alarm") == "update 1: mismatch: mean 1"
    here.check(job, 6)


def test_pause_and_resume(here: Installation, job: str) -> None:
    here.submit(job, updates=8)
    here.reached(job, 2)
    here.ask(job, "pause")
    wait_until(lambda: here.field(job, "state") == "paused", 30, "the pause")
    last = here.phases(job)[-1]
    assert (last.phase, last.rollout, last.trainer) == ("paused", "asleep", "asleep")
    here.ask(job, "resume")
    here.check(job, 8)


def test_a_second_job_waits_says_why_and_then_runs(here: Installation, job: str) -> None:
    second, third = job + "b", job + "c"
    here.submit(job, updates=6)
    here.reached(job, 1)
    here.submit(second, updates=2)
    here.submit(third, updates=2)
    wait_until(lambda: job in here.field(second, "reason"), 20, "the reason")
    assert here.field(second, "state") == "queued"
    here.ask(third, "cancel")
    assert here.ended(third) == "cancelled"
    assert here.phases(third) == []
    here.check(job, 6)
    here.check(second, 2)
    assert float(here.field(second, "started")) >= float(here.field(job, "ended"))


def test_cancel_ends_what_is_open_as_expired(here: Installation, job: str) -> None:
    here.submit(job, updates=100, mode="disjoint")
    here.reached(job, 2)
    here.ask(job, "cancel")
    assert here.ended(job) == "cancelled"
    counts = Ledger(here.bus, job, batch_groups=2, max_lag=1, policy="wait", max_attempts=5).counts()
    assert counts["running"] == counts["buffered"] == 0
    assert here.phases(job)[-1].phase == "done"
    ttl = here.bus.many([("TTL", JOB.at(job))])[0]
    assert 0 < ttl <= 168 * 3600


def test_a_process_that_reports_too_late_fails_the_job_with_its_name(here: Installation, job: str) -> None:
    here.submit(job, limits={"worker_start": 0.01})
    assert here.ended(job) == "failed"
    assert "for worker of trainer" in here.field(job, "reason")


def test_a_job_whose_every_trajectory_fails_ends_with_the_reason(here: Installation, job: str) -> None:
    here.submit(job, name="barren")
    assert here.ended(job) == "failed"
    assert "failed in a row" in here.field(job, "reason")
    assert "its prompt cannot be made" in here.field(job, "reason")
    counts = Ledger(here.bus, job, batch_groups=2, max_lag=1, policy="wait", max_attempts=5).counts()
    assert counts["submitted"] == counts["failed"] + counts["expired"]
    assert counts["submitted"] < 200, "it must not go round for long"


def test_a_job_whose_spec_cannot_be_read_fails_and_holds_nobody_up(here: Installation, job: str) -> None:
    broken = job + "a"
    here.bus.hset(JOB.at(broken), {"spec": '{"name": "x", "modell": 1}', "state": "queued"})
    here.bus.zadd(JOBS.at(), {broken: 1.0})
    here.jobs.append(broken)
    here.submit(job)
    assert here.ended(broken) == "failed"
    assert "modell" in here.field(broken, "reason")
    here.check(job)


def test_a_job_whose_folder_cannot_be_made_fails_and_holds_nobody_up(here: Installation, job: str) -> None:
    blocked, given_up = job + "a", job + "b"
    for name in (blocked, given_up):
        (here.runs / name).write_text("a file where the folder should be")
    here.submit(job)
    here.submit(given_up)
    here.ask(given_up, "cancel")
    assert here.ended(given_up) == "cancelled"
    here.submit(blocked)
    here.check(job)
    assert here.ended(blocked) == "failed"
    assert blocked in here.field(blocked, "reason")


def test_a_frozen_scheduler_that_wakes_does_not_write(here: Installation, job: str) -> None:
    here.submit(job, updates=6)
    here.reached(job, 2)
    assert here.scheduler is not None
    here.scheduler.send_signal(signal.SIGSTOP)
    here.bus.set(LOCK.at("scheduler"), "another", ttl=60)
    before = here.phases(job)
    here.scheduler.send_signal(signal.SIGCONT)
    assert here.scheduler.wait(20) == 1
    assert here.phases(job) == before
    here.bus.delete(LOCK.at("scheduler"))
    here.start()
    here.check(job, 6)

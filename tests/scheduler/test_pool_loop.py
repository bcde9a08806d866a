"""A pool that changes while its job runs: the scheduler as a real process, with stand-ins for the services."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from installation import Installation
from waiting import wait_until

from syncline.contract import events as e
from syncline.runtime.ledger import Ledger

LONG = 100_000
POOL = {"rollout": {"workers": 1, "workers_most": 3, "scaling": "request"}}


def pool(here: Installation, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(here.field(job, "pool") or "{}")
    return found


def settled(here: Installation, job: str, workers: int) -> None:
    """Until the job has exactly so many workers."""

    def there() -> bool:
        said = pool(here, job)
        return said.get("workers") == workers and not said["coming"] and not said["leaving"]

    wait_until(there, 60, f"{workers} workers of {job}")


def processes(here: Installation, job: str) -> dict[str, int]:
    """Live workers, and their pids."""
    state = json.loads((here.runs / "launch" / "jobs.json").read_text())["processes"]
    return {
        name.removeprefix(f"{job}/"): one["pid"]
        for name, one in state.items()
        if name.startswith(f"{job}/w") and not one["dead"]
    }


def finish(here: Installation, job: str) -> None:
    """End the job, whose own end is far away; every trajectory has then ended once, and updates are whole."""
    here.ask(job, "cancel")
    assert here.ended(job) == "cancelled"
    ledger = Ledger(here.bus, job, batch_groups=2, max_lag=1, policy="wait", max_attempts=5)
    counts = ledger.counts()
    ends = [counts[name] for name in ("trained", "filtered", "failed", "expired")]
    assert counts["running"] == counts["buffered"] == counts["failed"] == 0, counts
    assert counts["submitted"] == sum(ends), counts
    assert counts["trained"] >= 4 * int(here.field(job, "update")), counts
    assert counts["trained"] % 4 == 0, counts
    assert ledger.recount()["trained"] == counts["trained"]
    assert here.field(job, "violations") == ""


def test_a_killed_scheduler_goes_on_with_a_pool_that_changes(here: Installation, job: str) -> None:
    here.submit(job, spec=POOL, updates=LONG, mode="disjoint")
    here.reached(job, 2)
    here.ask(job, "scale", workers=3)
    wait_until(lambda: any(isinstance(x, e.ScaleTo) for x in here.events(job)), 20, "the request is taken")
    here.replace()
    settled(here, job, 3)
    assert set(processes(here, job)) == {"w0", "w1", "w2"}
    here.ask(job, "scale", workers=1)
    wait_until(lambda: pool(here, job)["workers"] == 1, 20, "the request is taken")
    here.replace()
    settled(here, job, 1)
    assert set(processes(here, job)) == {"w0"}
    finish(here, job)
    gone = [event.who for event in here.events(job) if isinstance(event, e.WorkerLeft)]
    assert sorted(gone) == ["w1", "w2"]
    assert {"w1", "w2"} <= {event.who for event in here.events(job) if isinstance(event, e.WorkerUp)}


def test_a_pool_changes_in_a_paused_job_and_through_a_switch(here: Installation, job: str) -> None:
    here.submit(job, spec=POOL, updates=LONG, mode="disjoint")
    here.reached(job, 2)
    here.ask(job, "pause")
    wait_until(lambda: here.field(job, "state") == "paused", 30, "the pause")
    here.ask(job, "scale", workers=3)
    settled(here, job, 3)
    here.ask(job, "resume")
    wait_until(lambda: here.phases(job)[-1].phase == "flow", 30, "the flow")
    here.ask(job, "scale", workers=2)
    here.ask(job, "switch", "colocated")
    wait_until(lambda: here.field(job, "mode") == "colocated", 30, "the switch")
    settled(here, job, 2)
    assert "colocated" in pool(here, job)["fixed"]
    here.ask(job, "scale", workers=3)
    update = int(here.field(job, "update"))
    here.reached(job, update + 2)
    assert pool(here, job)["workers"] == 2, "a colocated job's pool does not change"
    finish(here, job)


def test_a_worker_that_is_killed_while_it_leaves_loses_nothing(here: Installation, job: str) -> None:
    here.submit(job, spec=POOL | {"rollout": POOL["rollout"] | {"workers": 3}}, updates=LONG, mode="disjoint")
    here.reached(job, 2)
    settled(here, job, 3)
    pids = processes(here, job)
    os.kill(pids["w2"], signal.SIGSTOP)  # it hears nothing of the order to leave
    here.ask(job, "scale", workers=1)
    wait_until(lambda: pool(here, job)["leaving"] == ["w2"] or pool(here, job)["leaving"] == [], 30, "w1")
    os.kill(pids["w2"], signal.SIGKILL)
    settled(here, job, 1)
    update = int(here.field(job, "update"))
    here.reached(job, update + 3)
    finish(here, job)

"""A scheduler process on a run root of its own, and what a gateway would do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peers import COMMANDS
from waiting import wait_until

from syncline.contract import events as e
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVENTS, JOB, JOBS, LOCK, PHASES, REQUESTS, SAMPLES
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.ledger import Ledger

PEERS = Path(COMMANDS["rollout"][1])


class Installation:
    """A scheduler process on a run root of its own, and what a gateway would do."""

    def __init__(self, url: str, runs: Path) -> None:
        self.bus = Bus(url)
        # a scheduler runs every job that is listed, once it has the lease: what other tests left of both is in the way
        self.bus.delete(JOBS.at())
        self.bus.delete(LOCK.at("scheduler"))
        self.runs = runs
        self.env = {**os.environ, "SYNCLINE_REDIS_URL": url, "SYNCLINE_RUNS": str(runs), "SYNCLINE_PORT": "0"}
        self.scheduler: subprocess.Popen[bytes] | None = None
        self.jobs: list[str] = []

    def start(self) -> None:
        with (self.runs / "scheduler.log").open("ab") as log:
            argv = [sys.executable, str(PEERS), "scheduler"]
            self.scheduler = subprocess.Popen(argv, env=self.env, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self.scheduler is not None
        self.scheduler.kill()
        self.scheduler.wait()

    def replace(self) -> None:
        """Kill it and start its successor, which finds the dead one's lease run out."""
        self.kill()
        self.bus.delete(LOCK.at("scheduler"))
        self.start()

    def end_jobs(self) -> None:
        for job in self.jobs:
            if self.field(job, "state") not in e.TERMINAL_JOB_STATES:
                self.ask(job, "cancel")
        for job in self.jobs:
            self.ended(job)

    def stop(self) -> None:
        assert self.scheduler is not None
        self.scheduler.terminate()
        assert self.scheduler.wait(20) == 0

    def submit(
        self,
        job: str,
        limits: dict[str, float] | None = None,
        name: str = "peers",
        spec: dict[str, Any] | None = None,
        **schedule: Any,
    ) -> str:
        made = JobSpec.model_validate(
            {
                "name": name,
                "model": {"name": "none"},
                "batch": {"groups": 2, "group_size": 2},
                "schedule": {"updates": 4, **schedule},
                "limits": limits or {},
                **(spec or {}),
            },
            strict=False,
        )
        now = time.time()
        fields = {"spec": made.canonical(), "spec_hash": made.hash(), "state": "queued", "name": made.name}
        self.bus.hset(JOB.at(job), {**fields, "created": repr(now)})
        self.bus.zadd(JOBS.at(), {job: now})
        self.jobs.append(job)
        self.bus.append(REQUESTS.at(), e.Request(verb="submit", job=job, at=now))
        return job

    def ask(self, job: str, verb: Any, mode: e.Mode | None = None, workers: int | None = None) -> None:
        request = e.Request(verb=verb, job=job, mode=mode, workers=workers, at=time.time())
        self.bus.append(REQUESTS.at(), request)

    def field(self, job: str, name: str) -> str:
        return (self.bus.hget(JOB.at(job), name) or b"").decode()

    def ended(self, job: str, seconds: float = 60) -> str:
        def over() -> str:
            state = self.field(job, "state")
            return state if state in e.TERMINAL_JOB_STATES else ""

        try:
            return wait_until(over, seconds, f"the end of {job}")
        except AssertionError as error:
            tail = (self.runs / "scheduler.log").read_text()[-3000:]
            raise AssertionError(f"{error}; {self.bus.hgetall(JOB.at(job))}; {tail}") from None

    def reached(self, job: str, update: int) -> None:
        wait_until(lambda: int(self.field(job, "update") or 0) >= update, 60, f"update {update} of {job}")

    def phases(self, job: str) -> list[e.Phase]:
        return [unpack(entry, e.Phase) for entry in self.bus.range(PHASES.at(job))]

    def events(self, job: str) -> list[Any]:
        return [unpack(entry, e.Event) for entry in self.bus.range(EVENTS.at(job))]

    def check(self, job: str, updates: int = 4) -> None:
        """What holds of every job that succeeded."""
        assert self.ended(job) == "succeeded", (self.field(job, "reason"), self.bus.hgetall(JOB.at(job)))
        phases = self.phases(job)
        assert [p.seq for p in phases] == list(range(1, len(phases) + 1))
        both = [p for p in phases if p.rollout == p.trainer == "awake"]
        assert {p.mode for p in both} <= {"disjoint"}
        ledger = Ledger(self.bus, job, batch_groups=2, max_lag=1, policy="wait", max_attempts=5)
        counts = ledger.counts()
        assert counts["trained"] == updates * 4, counts
        assert counts["running"] == counts["buffered"] == 0, counts
        assert counts["submitted"] == updates * 4 + counts["failed"] + counts["expired"], counts
        samples = [unpack(entry, e.LedgerSample) for entry in self.bus.range(SAMPLES.at(job))]
        assert samples
        assert all(sample.holds for sample in samples)
        assert self.field(job, "violations") == ""
        assert self.field(job, "waits") == "[]"
        state = json.loads((self.runs / "launch" / "jobs.json").read_text())
        assert not any(name.startswith(job) for name in state["processes"])

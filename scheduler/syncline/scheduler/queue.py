"""Which job runs: one at a time on the installation's device; the others wait in order of submission and say why.

Requests of users come in here too. A request is taken and turned into an event of its job in one script, so it
acts once; a queued job's events wait in its stream until it starts, apart from `cancel`, which ends it at once.
"""

from __future__ import annotations

import os
import secrets
import time

from syncline.contract import events as e
from syncline.contract.events import TERMINAL_JOB_STATES
from syncline.contract.job import JobSpec
from syncline.contract.streams import (
    ACKS,
    EVENTS,
    GROUP_ROLLOUT,
    GROUP_SCHEDULER,
    GROUP_SYNC,
    JOB,
    JOBS,
    LOCK,
    MINTED,
    REQUESTS,
    WORK,
)
from syncline.runtime import steady
from syncline.runtime.bus import BadMessage, Entry, pack, unpack
from syncline.runtime.durable import write_whole
from syncline.runtime.lease import LeaseLost
from syncline.scheduler import evaluation_job
from syncline.scheduler.jobs import Job, begin
from syncline.scheduler.lookout import Tools
from syncline.scheduler.returning import mark_ended
from syncline.scheduler.saved import SERVICE, load
from syncline.scheduler.validating import Gate

LOOK = 0.5  # seconds between looks at the list of jobs
ASKED = 0.2  # seconds between looks at what users ask for, while a job runs

_TAKE = """
-- KEYS: requests, events of the job. ARGV: group, id of the request, packed event. 1: taken now; 0: it was before.
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[2], '*', 'm', ARGV[3])
return 1
"""

_SET = """
-- KEYS: lock, job. ARGV: holder, the state that the job must be in, fields and values. 1; 0: the lease is
-- another's; 2: the job is in another state.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if redis.call('HGET', KEYS[2], 'state') ~= ARGV[2] then return 2 end
redis.call('HSET', KEYS[2], unpack(ARGV, 3))
return 1
"""


class Queue:
    """All jobs of the installation. `current` runs, or is validated before it may; None: none does."""

    def __init__(self, tools: Tools) -> None:
        self._tools, self._bus = tools, tools.bus
        self.current: Job | Gate | None = None
        self._ended: set[str] = set()
        self._looked = self._asked = float("-inf")
        self._bus.ensure_group(REQUESTS.at(), GROUP_SCHEDULER)
        self._old: list[Entry] = list(self._bus.group_pending(REQUESTS.at(), GROUP_SCHEDULER, SERVICE))

    # ---- requests --------------------------------------------------------------------------------------------
    def take_requests(self, block: float | None = None) -> None:
        """Turn what users asked for into events; those that a killed scheduler had taken come first.

        block   seconds to wait for the first; None: not at all, and there was a look a moment ago
        """
        if block is None and time.monotonic() - self._asked < ASKED:
            return
        self._asked = time.monotonic()
        new = self._bus.group_read(REQUESTS.at(), GROUP_SCHEDULER, SERVICE, 100, None if self._old else block)
        for entry in (*self._old, *new):
            try:
                self._take(entry, unpack(entry, e.Request))
            except BadMessage as error:
                self._tools.log.error("%s", error)
                self._bus.ack(REQUESTS.at(), GROUP_SCHEDULER, [entry.id])
        self._old = []
        if new:
            self._looked = float("-inf")

    def _take(self, entry: Entry, request: e.Request) -> None:
        event = _event(request)
        if isinstance(event, e.ScaleTo) and self._tools.launcher.fixed:
            self._tools.log.warning("%s: %s", request.job, self._tools.launcher.fixed)
            event = None
        state = (self._bus.hget(JOB.at(request.job), "state") or b"").decode()
        if event is None and state == "queued":
            self._note_on_disk(request.job)
        if (
            event is None
            or state in ("", *TERMINAL_JOB_STATES)
            or (request.verb == "cancel" and state == "queued" and self._cancel(request.job))
        ):
            self._bus.ack(REQUESTS.at(), GROUP_SCHEDULER, [entry.id])
        else:
            keys = [REQUESTS.at(), EVENTS.at(request.job)]
            self._bus.script(_TAKE)(keys, [GROUP_SCHEDULER, entry.id, pack(event)])
        self._tools.log.info("%s: %s asked for", request.job, request.verb)

    def _cancel(self, job: str) -> bool:
        """End a job that has not started. False: it has started meanwhile."""
        self._note_on_disk(job)
        ending = {"state": "cancelled", "reason": "cancelled", "ended": repr(time.time())}
        if not self._set(job, "queued", ending):
            return False
        mark_ended(self._tools.settings.job_dir(job), "cancelled", "cancelled")
        return True

    def _note_on_disk(self, job: str) -> None:
        """The folder of a job that waits, for a Redis that may forget it. What cannot be made fails later."""
        try:
            self._prepare_folder(job, self._spec(job))
        except (ValueError, OSError) as error:
            self._tools.log.error("%s has no folder: %s", job, error)

    # ---- who runs --------------------------------------------------------------------------------------------
    def choose(self) -> Job | Gate | None:
        """The job that runs, adopted or started if need be. None: there is none."""
        if isinstance(self.current, Gate) and self.current.over:
            self.current = begin(self._tools, self.current.job, self.current.spec)
        if time.monotonic() - self._looked < LOOK:
            return self.current
        self._looked = time.monotonic()
        open_jobs = self._open_jobs()
        if self.current is None and open_jobs:
            begun = [job for job, state in open_jobs.items() if state != "queued"]
            job = (begun or list(open_jobs))[0]
            try:
                self.current = self._open(job)
            except (ValueError, OSError) as error:  # what cannot be read, or has no folder, holds nobody up
                self._tools.log.error("%s cannot be run: %s", job, error)
                ending = {"state": "failed", "reason": str(error), "ended": repr(time.time())}
                self._set(job, open_jobs[job], ending)
                mark_ended(self._tools.settings.job_dir(job), "failed", str(error))
        for job, state in open_jobs.items():
            if state == "queued" and self.current is not None and job != self.current.job:
                self._say_why(job, self.current)
        return self.current

    def release(self) -> None:
        """The current job is over."""
        assert self.current is not None
        self._ended.add(self.current.job)
        self.current, self._looked = None, float("-inf")

    def _open_jobs(self) -> dict[str, str]:
        names = [name.decode() for name in self._bus.zrange(JOBS.at())]
        names = [name for name in names if name not in self._ended]
        states = self._bus.many([("HGET", JOB.at(name), "state") for name in names]) if names else []
        found = {name: (state or b"").decode() for name, state in zip(names, states, strict=True)}
        self._ended |= {name for name, state in found.items() if state in ("", *TERMINAL_JOB_STATES)}
        return {name: state for name, state in found.items() if name not in self._ended}

    def _open(self, job: str) -> Job | Gate:
        spec = self._spec(job)
        self._prepare_folder(job, spec)
        for key, group in (
            (WORK, GROUP_ROLLOUT),
            (MINTED, GROUP_SYNC),
            (ACKS, GROUP_SYNC),
        ):
            self._bus.ensure_group(key.at(job), group)
        saved, pinned = load(self._bus, job), spec.kind == "evaluate"
        if saved is None:
            self._tools.log.info("%s starts: %s", job, spec.name)
            folder = str(self._tools.settings.job_dir(job))
            self._set(job, "queued", {"started": repr(time.time()), "reason": "", "folder": folder})
            if spec.validation.before_start:
                return Gate(self._tools, job, spec, lambda fields: self._validating(job, fields))
            return evaluation_job.begin(self._tools, job, spec) if pinned else begin(self._tools, job, spec)
        self._tools.log.info("%s goes on in %s at %s", job, saved.state.stage, saved.cursor)
        now = steady.now()  # nobody could report for duty to a dead scheduler
        saved.watch.awaited = dict.fromkeys(saved.watch.awaited, now)
        return (evaluation_job.EvaluationJob if pinned else Job)(self._tools, job, spec, saved)

    def _spec(self, job: str) -> JobSpec:
        text = self._bus.hget(JOB.at(job), "spec")
        if text is None:
            raise ValueError(f"{JOB.at(job)} has no spec")
        return JobSpec.model_validate_json(text)

    def _prepare_folder(self, job: str, spec: JobSpec) -> None:
        """The run folder with the resolved spec and the manifest key. Made once; a second time changes nothing."""
        folder = self._tools.settings.job_dir(job)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        write_whole(folder / "spec.json", spec.canonical().encode())
        key = folder / "key"
        if not key.exists():
            with open(
                os.open(folder / ".key.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as file:
                file.write(secrets.token_bytes(32))
                file.flush()
                os.fsync(file.fileno())
            (folder / ".key.new").replace(key)

    def _validating(self, job: str, fields: dict[str, str]) -> None:
        """Say how far the gate of a job is, which may have been queued until now."""
        if not self._set(job, "validating", fields):
            self._set(job, "queued", fields)

    def _say_why(self, job: str, current: Job | Gate) -> None:
        reason = f"waits for the device: job {current.job} ({current.spec.name}) has it"
        if self._bus.hget(JOB.at(job), "reason") != reason.encode():
            self._set(job, "queued", {"reason": reason})

    def _set(self, job: str, state: str, fields: dict[str, str]) -> bool:
        """Write fields of a job that is in `state`. False: it is not. Raises `LeaseLost`."""
        args = [self._tools.holder, state, *(part for pair in fields.items() for part in pair)]
        answer = int(self._bus.script(_SET)([LOCK.at(SERVICE), JOB.at(job)], args))
        if answer == 0:
            raise LeaseLost(
                f"the scheduler's lease is not {self._tools.holder}'s any more: {job} not written"
            )
        return answer == 1


def _event(request: e.Request) -> e.Event | None:
    """The event that a request becomes; None: `submit`, which the list of jobs says already."""
    match request.verb:
        case "cancel":
            return e.Cancel()
        case "pause":
            return e.Pause()
        case "resume":
            return e.Resume()
        case "switch" if request.mode is not None:
            return e.SwitchTo(mode=request.mode, why="request")
        case "scale" if request.workers is not None:
            return e.ScaleTo(workers=request.workers, why="request")
    return None

"""Trackers of all jobs: one process each, started, watched, and started again.

consumes      the jobs in Redis, and the `tracking` of their specs
produces      processes (`tracker.py`); what became of them, for `GET /v1/jobs/{job}/tracking` and the log
waits for     a job that wants a tracker, or the end of one
unblocked by  the gateway; the tracker, which ends by itself once its job has ended

A tracker that fails is tried again, later each time, and the job never hears of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import msgspec

from syncline.contract.events import TERMINAL_JOB_STATES
from syncline.contract.job import JobSpec, Problem
from syncline.contract.streams import JOB, JOBS
from syncline.contract.tracking_spec import Tracker
from syncline.gateway.records import find
from syncline.gateway.tracker import read_told
from syncline.gateway.tracking_writers import EXTRAS
from syncline.runtime.bus import BadMessage, Bus
from syncline.runtime.settings import Settings

INTERVAL = 1.0
LEAVING = 5.0  # seconds that trackers may take while the gateway ends
AGAIN = (5.0, 30.0, 120.0)  # seconds until a tracker that failed is tried again; the last one for ever
MOST = 12  # failures in succession after which it is given up
_LOG = logging.getLogger(__name__)


class TrackerView(msgspec.Struct, frozen=True, kw_only=True):
    """A tracker of a job. `update`: the newest that it told; `reason`: of its last failure, "" once it works again."""

    tracker: Tracker
    state: Literal["following", "done", "failing", "given up", "waiting"]
    update: int
    failures: int
    reason: str


class _Followed:
    """One tracker of one job."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.failures = 0
        self.reason = ""
        self.since = 0  # update that was told when it failed last
        self.later = 0.0  # not before, by the monotonic clock


class Trackers:
    """The trackers of this run root. `keep` runs on a thread; `views` may be asked from others."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._followed: dict[tuple[str, Tracker], _Followed] = {}
        self._wanted: dict[str, tuple[Tracker, ...]] = {}  # of jobs whose spec was read

    def keep(self, bus: Bus, stopping: threading.Event) -> None:
        """Start what is wanted and watch it, until told to stop."""
        while not stopping.wait(INTERVAL):
            for name in bus.zrange(JOBS.at()):
                job = name.decode()
                for tracker in self._trackers(bus, job):
                    with self._lock:
                        self._look_after(job, tracker, self._followed.setdefault((job, tracker), _Followed()))
        self.stop()

    def views(self, job: str, spec: JobSpec) -> list[TrackerView]:
        """How it stands with each tracker that the spec wants."""
        with self._lock:
            return [self._view(job, tracker) for tracker in spec.tracking.trackers()]

    def busy(self) -> bool:
        """Whether a tracker runs."""
        with self._lock:
            running = [f.process for f in self._followed.values() if f.process is not None]
            return any(process.poll() is None for process in running)

    def stop(self) -> None:
        """Tell all that the gateway goes, and give them `LEAVING` seconds; who needs longer ends by itself."""
        with self._lock:
            running = [f.process for f in self._followed.values() if f.process is not None]
        for process in running:
            if process.stdin is not None:
                process.stdin.close()
        until = time.monotonic() + LEAVING
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def _trackers(self, bus: Bus, job: str) -> tuple[Tracker, ...]:
        """What `job` wants, once it has begun: before that it has no folder."""
        if job not in self._wanted:
            if not self._settings.job_dir(
                job
            ).is_dir():  # looked at first: thousands may wait, and a spec is long
                return ()
            state = (bus.hget(JOB.at(job), "state") or b"").decode()
            try:
                record = find(bus, self._settings, job)
            except BadMessage as error:  # told once: no other job's trackers wait for it
                _LOG.error("no trackers of %s: %s", job, error)
                self._wanted[job] = ()
                return ()
            if record is None:
                return ()
            wanted = record.spec.tracking.trackers()
            if state in TERMINAL_JOB_STATES:  # told to its end by a gateway before this one, or still to be
                wanted = tuple(t for t in wanted if not read_told(record.folder, t).done)
            self._wanted[job] = wanted
        return self._wanted[job]

    def _look_after(self, job: str, tracker: Tracker, followed: _Followed) -> None:
        process = followed.process
        told = read_told(self._settings.job_dir(job), tracker)
        if process is None:
            if told.done:  # nothing of it is read again
                self._wanted[job] = tuple(t for t in self._wanted[job] if t != tracker)
            elif followed.failures < MOST and time.monotonic() >= followed.later:
                followed.process = self._start(job, tracker)
            return
        code = process.poll()
        if code is None:
            if told.update > followed.since and followed.failures:
                followed.failures, followed.reason = 0, ""
            return
        followed.process = None
        if code == 0:
            return
        followed.since = told.update
        followed.later = time.monotonic() + AGAIN[min(followed.failures, len(AGAIN) - 1)]
        followed.failures += 1
        followed.reason = _last_line(self._log(job, tracker)) or f"it ended with exit code {code}"
        what = "is given up" if followed.failures == MOST else "is tried again; the job goes on"
        _LOG.error("tracker %s of %s %s: %s", tracker, job, what, followed.reason)

    def _start(self, job: str, tracker: Tracker) -> subprocess.Popen[bytes]:
        log = self._log(job, tracker)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "syncline.gateway.tracker", job, tracker],
                stdin=subprocess.PIPE,  # it ends when we do
                stdout=out,
                stderr=out,
                env=self._settings.inherited(os.environ),
            )

    def _log(self, job: str, tracker: Tracker) -> Path:
        return self._settings.job_dir(job) / "logs" / f"tracking-{tracker}.log"

    def _view(self, job: str, tracker: Tracker) -> TrackerView:
        followed = self._followed.get((job, tracker), _Followed())
        told = read_told(self._settings.job_dir(job), tracker)
        state: Literal["following", "done", "failing", "given up", "waiting"] = "waiting"
        if told.done:
            state = "done"
        elif followed.failures:
            state = "given up" if followed.failures >= MOST else "failing"
        elif followed.process is not None:
            state = "following"
        return TrackerView(
            tracker=tracker,
            state=state,
            update=told.update,
            failures=followed.failures,
            reason=followed.reason,
        )


def missing_extras(spec: JobSpec) -> list[Problem]:
    """Trackers of `spec` whose library is not installed where the gateway is."""
    return [
        Problem(
            path=f"tracking.{tracker}",
            message=f"needs the module {EXTRAS[tracker]}, which is not installed beside the gateway",
            hint=f"pip install 'syncline[{tracker}]'",
        )
        for tracker in spec.tracking.trackers()
        if importlib.util.find_spec(EXTRAS[tracker]) is None
    ]


def _last_line(path: Path) -> str:
    """What a process said last, at most 500 characters of it."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")

"""The jobs' numbers for Prometheus: one scrape target for every launcher, put together from what Redis knows.

Why here and not in each process: docs/decisions/0018-seeing.md. What is shown of which job: `metrics_jobs.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from syncline.contract.events import Heartbeat
from syncline.contract.streams import CELERY, HEARTBEAT
from syncline.gateway import metrics_names as names
from syncline.gateway.metrics_account import Account
from syncline.gateway.metrics_jobs import Shown, shown
from syncline.gateway.metrics_said import say_job
from syncline.gateway.metrics_sheet import Sheet
from syncline.gateway.metrics_state import Standing, standing
from syncline.runtime.bus import BadMessage, Bus, BusDown, unpack
from syncline.runtime.settings import Settings

FRESH = 1.0  # seconds for which a scrape's answer serves the next one: many scrapers cost no more than one
QUEUE = "errands"  # of `runtime/errands.py`, which brings Celery with it
_SERVICES = ("gateway", "scheduler", "errands")
_LOG = logging.getLogger(__name__)


class JobNumbers(Collector):
    """A collector over `bus`. Keeps the sums of each shown job, which can be made again from its streams."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self._settings, self._bus = settings, bus
        self._lock = threading.Lock()
        self._accounts: dict[str, Account] = {}
        self._made: tuple[float, list[Family]] = (float("-inf"), [])

    def describe(self) -> Iterable[Family]:
        """Nothing: who registers a collector need not have a Redis that answers."""
        return []

    def collect(self) -> Iterable[Family]:
        """The families of this moment. Without Redis only that it does not answer."""
        with self._lock:
            at, families = self._made
            if time.monotonic() - at > FRESH:
                families = list(self._sheet().families())
                self._made = (time.monotonic(), families)
            return families

    def _sheet(self) -> Sheet:
        sheet = Sheet()
        try:
            self._say_all(sheet)
        except BusDown:
            sheet = Sheet()
            sheet.say(names.REDIS_UP, 0)
        return sheet

    def _say_all(self, sheet: Sheet) -> None:
        seconds, micros = self._bus.call("TIME")
        found = shown(self._bus, time.time())
        self._say_installation(sheet, found)
        self._accounts = {job: self._accounts.get(job) or Account(job) for job in found.jobs}
        for job, account in self._accounts.items():
            try:
                account.read(self._bus)
                state = standing(self._bus, self._settings, job)
            except BadMessage as error:
                _LOG.warning("no numbers of %s: %s", job, error)
                continue
            if state is not None:
                say_job(sheet, account, state, int(seconds) + int(micros) / 1e6)
                if not state.over:
                    self._say_processes(sheet, job, state)

    def _say_installation(self, sheet: Sheet, found: Shown) -> None:
        info = self._bus.call("INFO", "memory").decode()
        memory = next(line for line in info.splitlines() if line.startswith("used_memory:"))
        sheet.say(names.REDIS_UP, 1)
        sheet.say(names.REDIS_BYTES, int(memory.partition(":")[2]))
        for state, count in sorted(found.states.items()):
            sheet.say(names.JOBS, count, state)
        sheet.say(names.JOBS_LEFT_OUT, found.left_out)
        sheet.say(names.ERRANDS_QUEUED, self._bus.call("LLEN", CELERY.at(QUEUE)))
        self._say_beats(sheet, "", [f"{name}/{name}" for name in _SERVICES])

    def _say_processes(self, sheet: Sheet, job: str, state: Standing) -> None:
        workers = [f"rollout/{name}" for name in sorted(state.workers)]
        self._say_beats(sheet, job, [*workers, "trainer/trainer", "sync/sync"])

    def _say_beats(self, sheet: Sheet, job: str, names_of: list[str]) -> None:
        keys = [HEARTBEAT.at(f"{job}/{name}" if job else name) for name in names_of]
        for name, raw in zip(names_of, self._bus.many([("GET", key) for key in keys]), strict=True):
            service, _, process = name.partition("/")
            sheet.say(names.PROCESS_UP, 1 if raw else 0, job, service, process)
            if not raw:
                continue
            beat = unpack(raw, Heartbeat)
            sheet.say(names.PROCESS_READY, 1 if beat.ready else 0, job, service, process)
            sheet.say(names.SPANS, beat.spans, job, service, process)
            for why, count in sorted(beat.missing.items()):
                sheet.say(names.SPANS_MISSING, count, job, service, process, why)

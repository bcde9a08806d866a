"""Follow one job until it ends: a live panel on a terminal, a line per news elsewhere.

What was read at one moment, and how it looks, is `snapshot.py`.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from syncline.contract.version_path import parse_version
from syncline.scheduler.cli_session import collected, note, say
from syncline.scheduler.client import Client, Refused, Unreachable
from syncline.scheduler.snapshot import Snapshot, full_line, last_served, line, panel

if TYPE_CHECKING:
    pass

INTERVAL = 0.5  # seconds between looks
QUIET = 10.0  # seconds without news after which a plain line says so
GATEWAY_PATIENCE = 60.0  # seconds for a gateway to come back


class _Watcher:
    """Reads snapshots; full pages of metrics are read once."""

    def __init__(self, client: Client, job: str) -> None:
        self._client, self._job, self._path = client, job, f"/v1/jobs/{job}"
        self._older: list[dict[str, Any]] = []  # of pages that are full
        self._after: dict[str, str] = {}
        self._served: dict[str, str] = {}
        self._told: object = None  # what the job was like when its version records were read
        self._rest = 0.0  # monotonic seconds before which they are not read again

    def look(self) -> Snapshot:
        """A snapshot; says so when the services go away, and when they are back.

        Raises `Unreachable` or `Refused` once they have been away for `GATEWAY_PATIENCE`.
        """
        end, away = time.monotonic() + GATEWAY_PATIENCE, False
        while True:
            try:
                found = self._look()
            except (Unreachable, Refused) as error:
                passing = isinstance(error, Unreachable) or error.problem.status == 503
                if not passing or time.monotonic() > end:
                    raise
                if not away:
                    note(gone_away(error, self._job))
                away = True
            else:
                if away:
                    note(f"the services are back; web page at {self._client.url}")
                return found
            time.sleep(INTERVAL)
            self._client.find_again()

    def _look(self) -> Snapshot:
        job = self._client.get(self._path)
        if not job["recorded"]:
            return Snapshot(job=job, metrics=[], workers=[])
        while True:
            page = self._client.get(f"{self._path}/metrics", limit=100, **self._after)
            if page["next"] is None:
                break
            self._older += page["items"]
            self._after = {"after": page["next"]}
        workers = self._client.get(f"{self._path}/workers")["items"]
        self._remember(job, workers)
        metrics = self._older + page["items"]
        return Snapshot(job=job, metrics=metrics, workers=workers, served=dict(self._served))

    def _remember(self, job: dict[str, Any], workers: list[dict[str, Any]]) -> None:
        """A worker that serves says its version. What the others served is in the version records.

        A worker may serve and sleep again between two looks, so the records are read at each change; the longer
        they took to read, the longer they rest. Of versions that all have left behind, none is read again.
        """
        self._served |= {w["worker"]: w["version"] for w in workers if w["version"] is not None}
        change = (job["update"], [(w["worker"], w["version"], w["state"]) for w in workers])
        began = time.monotonic()
        if change == self._told or began < self._rest or all(w["version"] is not None for w in workers):
            return
        silent = {w["worker"] for w in workers if w["version"] is None}
        newer = collected(self._client, f"{self._path}/versions", after=self._all_served(silent))
        self._served |= {w: version for w, version in last_served(newer).items() if w in silent}
        self._told, self._rest = change, time.monotonic() + 10 * (time.monotonic() - began)

    def _all_served(self, workers: set[str]) -> str | None:
        """A version after which comes whatever they serve next, since no worker goes back; None: one never served."""
        known = [self._served[worker] for worker in workers if worker in self._served]
        return min(known, key=parse_version) if len(known) == len(workers) else None


def follow(client: Client, job: str, *, cancel: bool = False) -> dict[str, Any]:
    """Show the job until it ends; returns it. `cancel`: Ctrl-C asks the job to end, a second one leaves."""
    watcher = _Watcher(client, job)
    with _interrupts(client, job, cancel) as interrupted:
        return _live(watcher, interrupted) if sys.stdout.isatty() else _plain(watcher, interrupted)


def _live(watcher: _Watcher, interrupted: threading.Event) -> dict[str, Any]:
    from rich.live import Live

    snapshot = watcher.look()
    with Live(panel(snapshot), refresh_per_second=4) as live:
        while not snapshot.ended:
            interrupted.wait(INTERVAL)
            interrupted.clear()
            snapshot = watcher.look()
            live.update(panel(snapshot))
    return snapshot.job


def _plain(watcher: _Watcher, interrupted: threading.Event) -> dict[str, Any]:
    told, at = "", 0.0
    while True:
        snapshot = watcher.look()
        news = line(snapshot)
        if news != told or time.monotonic() - at > QUIET:
            say(full_line(snapshot))
            told, at = news, time.monotonic()
        if snapshot.ended:
            return snapshot.job
        interrupted.wait(INTERVAL)
        interrupted.clear()


@contextmanager
def _interrupts(client: Client, job: str, cancel: bool) -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM while a job is followed."""
    once = threading.Event()
    woken = threading.Event()

    def asked(number: int, frame: object) -> None:
        if not cancel or once.is_set():
            raise KeyboardInterrupt
        once.set()
        note(f"asking {job} to end; Ctrl-C again leaves at once")
        try:
            client.post(f"/v1/jobs/{job}/cancel")
        except (Refused, Unreachable) as error:
            note(f"error: {error}")
        woken.set()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield woken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def gone_away(error: Exception, job: str) -> str:
    """What to tell, and what to do, when the services stop answering while a job is followed."""
    return (
        f"the services went away ({error}); the job goes on after `syncline up`: waiting {GATEWAY_PATIENCE:.0f} s "
        f"for it, later follow with `syncline watch {job}`"
    )

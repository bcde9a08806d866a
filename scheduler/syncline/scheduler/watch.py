"""Follow one job until it ends: a live panel on a terminal, a line per news elsewhere.

`Snapshot` is what was read at one moment; `line` and `panel` turn it into text and are pure.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from syncline.contract.events import TERMINAL_JOB_STATES
from syncline.scheduler.cli_session import note, say, short
from syncline.scheduler.client import Client, Refused, Unreachable

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERVAL = 0.5  # seconds between looks
QUIET = 10.0  # seconds without news after which a plain line says so
GATEWAY_PATIENCE = 60.0  # seconds for a gateway to come back
RATE_SECONDS = 10.0  # of the updates that the rate tells of
SPARKS = "▁▂▃▄▅▆▇█"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment, as the gateway tells it."""

    job: dict[str, Any]
    metrics: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    served: dict[str, str] = {}  # worker -> the last version that it served; absent: it never served

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: the job has ended, or Redis has forgotten it."""
        return self.job["state"] in TERMINAL_JOB_STATES or not self.job["recorded"]

    @property
    def last(self) -> dict[str, Any] | None:
        return self.metrics[-1] if self.metrics else None

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of the last updates over the time that these took; without any, what workers say."""
        rate = update_rate(self.metrics, max((worker["at"] for worker in self.workers), default=0.0))
        return float(sum(worker["tokens_per_second"] for worker in self.workers)) if rate is None else rate


def update_rate(metrics: list[dict[str, Any]], now: float) -> float | None:
    """Sampled tokens per second of the updates in the last `RATE_SECONDS` before the newest one.

    An update took the time since the one before it. How long the first of an epoch took is not recorded, so it is
    left out, and with it the time in which nothing ran. None: no update is left. `now` is the installation's latest
    stamp, in seconds: once no update came for longer than the told ones took, the rate sinks.
    """
    tokens, took = 0, 0.0
    for i in range(len(metrics) - 1, 0, -1):
        before, made = metrics[i - 1], metrics[i]
        if made["at"] <= metrics[-1]["at"] - RATE_SECONDS:
            break
        if before["epoch"] == made["epoch"]:
            tokens += made["tokens"]
            took += made["at"] - before["at"]
    return tokens / max(took, now - metrics[-1]["at"]) if took > 0 else None


def last_served(versions: list[dict[str, Any]]) -> dict[str, str]:
    """Worker -> the version that became active on it last, from version records."""
    newest: dict[str, tuple[float, str]] = {}
    for record in versions:
        for worker, path in record["workers"].items():
            at = path["active"]
            if at is not None and at >= newest.get(worker, (0.0, ""))[0]:
                newest[worker] = (at, record["version"])
    return {worker: version for worker, (_, version) in newest.items()}


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
        they took to read, the longer they rest.
        """
        self._served |= {w["worker"]: w["version"] for w in workers if w["version"] is not None}
        change = (job["update"], [(w["worker"], w["version"], w["state"]) for w in workers])
        began = time.monotonic()
        if change == self._told or began < self._rest or all(w["version"] is not None for w in workers):
            return
        served = last_served(self._client.get(f"{self._path}/versions")["items"])
        silent = {w["worker"] for w in workers if w["version"] is None}
        self._served |= {worker: version for worker, version in served.items() if worker in silent}
        self._told, self._rest = change, time.monotonic() + 10 * (time.monotonic() - began)


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


# ---- a snapshot as text ------------------------------------------------------------------------------------
def line(s: Snapshot) -> str:
    """What makes news in plain output: state, mode, updates made. Figures ride along."""
    return f"{s.job['state']} {s.job['mode']} {s.job['update']}"


def full_line(s: Snapshot) -> str:
    """One line with everything that a glance needs."""
    job, last = s.job, s.last
    parts = [f"{job['state']:<9}", f"update {job['update']}/{job['updates']}"]
    if last is not None:
        parts += [f"reward {short(last['reward'])}", f"lag {short(last['lag_mean'])} (max {last['lag_max']})"]
    parts.append(f"{s.tokens_per_second:,.0f} tokens/s")
    if job["mode"]:
        parts.append(f"{job['mode']}/{job['phase']}")
    parts += [f"{w['worker']}={served_version(s, w)}" for w in s.workers]
    parts += [f"waits: {wait['owner']} for {wait['name']}" for wait in job["waits"][:2]]
    if job["reason"]:
        parts.append(f"({job['reason']})")
    return "  ".join(parts)


def served_version(s: Snapshot, worker: dict[str, Any]) -> str:
    """The version that a worker serves, or served last with its state; a dash: it never served."""
    if worker["version"] is not None:
        return str(worker["version"])
    last = s.served.get(worker["worker"])
    return "-" if last is None else f"{last} ({worker['state']})"


def sparkline(values: list[float], width: int = 40) -> str:
    """Values as blocks, the newest at the right; the scale runs from 0 to 1, or to the largest value."""
    if not values:
        return ""
    each = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in (values[i : i + each] for i in range(0, len(values), each))]
    low, high = min(0.0, *means), max(1.0, *means)
    return "".join(SPARKS[int((mean - low) / (high - low) * (len(SPARKS) - 1))] for mean in means)


def panel(s: Snapshot) -> RenderableType:
    """The live view: progress, figures, workers, waits."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    job = s.job
    bar = Table.grid()  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=job["updates"], completed=job["update"], width=60))
    rewards = [m["reward"] for m in s.metrics if m["reward"] is not None]
    rows: list[RenderableType] = [
        Text(f"{job['update']} of {job['updates']} updates   {job['mode'] or '-'} / {job['phase'] or '-'}"),
        bar,
        Text(f"reward {sparkline(rewards)} {short(rewards[-1] if rewards else None)}"),
        _figures(s),
    ]
    if s.workers:
        rows.append(_workers(s))
    for wait in job["waits"]:
        left = max(0.0, wait["deadline"] - time.time())
        rows.append(
            Text(f"waits: {wait['owner']} for {wait['name']}, {wait['detail']} ({left:.0f} s left)", "dim")
        )
    if job["reason"]:
        rows.append(Text(job["reason"]))
    return Panel(Group(*rows), title=f"{job['name']} {job['id']} {job['state']}", title_align="left")


def _figures(s: Snapshot) -> RenderableType:
    from rich.text import Text

    text = f"{s.tokens_per_second:,.0f} tokens/s"
    if s.last is not None:
        text += f"   lag {short(s.last['lag_mean'])}, at most {s.last['lag_max']}"
        text += f"   step {short(s.last['seconds'], ' s')}   gap {short(s.last['gap_mean'])}"
    return Text(text)


def _workers(s: Snapshot) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("worker", "state", "version", "staged", "running", "tokens/s"):
        table.add_column(column)
    for w in s.workers:
        rate = f"{w['tokens_per_second']:,.0f}"
        versions = (served_version(s, w), w["staged"] or "-")
        table.add_row(w["worker"], w["state"], *versions, str(w["running"]), rate)
    return table

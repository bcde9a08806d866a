"""A job at one moment, and how that looks: as a line, as a panel. Pure: nothing here asks anybody."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from syncline.contract.events import TERMINAL_JOB_STATES
from syncline.scheduler.cli_session import short

if TYPE_CHECKING:
    from rich.console import RenderableType

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


def line(s: Snapshot) -> str:
    """What makes news in plain output: state, mode, updates made, an alarm. Figures ride along."""
    return f"{s.job['state']} {s.job['mode']} {s.job['update']} {s.job['alarm']} {pool_words(s.job)}"


def pool_words(job: dict[str, Any]) -> str:
    """How many workers are wanted, and who comes or leaves; "" where the number cannot change."""
    pool = job.get("pool")
    if pool is None or pool["least"] == pool["most"]:
        return ""
    marks = [f"+{name}" for name in pool["coming"]] + [f"-{name}" for name in pool["leaving"]]
    return " ".join([f"pool {pool['workers']}", *marks])


def full_line(s: Snapshot) -> str:
    """One line with everything that a glance needs."""
    job, last = s.job, s.last
    parts = [f"{job['state']:<9}", f"update {job['update']}/{job['updates']}"]
    if last is not None:
        parts += [f"reward {short(last['reward'])}", f"lag {short(last['lag_mean'])} (max {last['lag_max']})"]
    parts.append(f"{s.tokens_per_second:,.0f} tokens/s")
    if job["mode"]:
        parts.append(f"{job['mode']}/{job['phase']}")
    if pool := pool_words(job):
        parts.append(pool)
    parts += [f"{w['worker']}={served_version(s, w)}" for w in s.workers]
    parts += [f"waits: {wait['owner']} for {wait['name']}" for wait in job["waits"][:2]]
    if job["alarm"]:
        parts.append(f"ALARM {job['alarm']}")
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
        Text(
            f"{job['update']} of {job['updates']} updates   {job['mode'] or '-'} / {job['phase'] or '-'}   "
            f"{pool_words(job)}"
        ),
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
    if job["alarm"]:
        rows.append(Text(f"alarm: {job['alarm']}", "bold red"))
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

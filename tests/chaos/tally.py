"""What a campaign recorded, row by row, and the page made from it."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "docs" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
SOURCE = ROOT / "tests" / "chaos" / "reliability.head.md"


class Row(msgspec.Struct, kw_only=True):
    """One fault. Counts are of injections, but for these, which are of trajectories: `lost`, `repeated`, `reported`.

    survived   injections after which the job ended as it must, with every guarantee
    lost       neither trained nor ended with a reason
    repeated   trained more than once
    reported   ended by the ledger with a reason, while the job ran
    recovery   seconds from an injection to the next version, of each that was followed by one
    """

    level: str
    fault: str
    injections: int = 0
    survived: int = 0
    lost: int = 0
    repeated: int = 0
    reported: int = 0
    recovery: list[float] = []


class Failure(msgspec.Struct, kw_only=True):
    """A case that did not end as it must, to be made again: `case` and `seed` name it."""

    case: str
    seed: int
    story: str


class Recorded(msgspec.Struct, kw_only=True):
    """The file. `seconds`: that the campaign took; `seed`: it began with; `note`: what the page says of it besides."""

    seed: int
    note: str = ""
    seconds: float = 0.0
    rows: list[Row] = []
    failures: list[Failure] = []

    def row(self, level: str, fault: str) -> Row:
        """The row of a fault, made when it is first asked for."""
        for row in self.rows:
            if (row.level, row.fault) == (level, fault):
                return row
        self.rows.append(Row(level=level, fault=fault))
        return self.rows[-1]

    @property
    def injections(self) -> int:
        return sum(row.injections for row in self.rows)


def load(path: Path = RECORDED) -> Recorded:
    """Raises `msgspec.ValidationError` for a file of another shape."""
    return msgspec.json.decode(path.read_bytes(), type=Recorded)


def save(recorded: Recorded, path: Path = RECORDED) -> None:
    for row in recorded.rows:
        row.recovery = [round(seconds, 2) for seconds in row.recovery]
    path.write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=1) + b"\n")


def page(recorded: Recorded) -> str:
    """`docs/reliability.md`: the head as written, the table as recorded."""
    return SOURCE.read_text().replace("<!-- table -->\n", table(recorded))


def table(recorded: Recorded) -> str:
    head = (
        "level",
        "fault",
        "injections",
        "survived",
        "lost",
        "repeated",
        "reported",
        "recovery, s: median, most",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    rows = sorted(recorded.rows, key=lambda row: (row.level, row.fault))
    for row in rows:
        spread = f"{statistics.median(row.recovery):.1f}, {max(row.recovery):.1f}" if row.recovery else ""
        cells = (row.injections, row.survived, row.lost, row.repeated, row.reported, spread)
        lines.append(f"| {row.level} | {row.fault} | " + " | ".join(map(str, cells)) + " |")
    sums = [
        sum(getattr(row, name) for row in rows)
        for name in ("injections", "survived", "lost", "repeated", "reported")
    ]
    lines.append("| **all** | | " + " | ".join(f"**{number}**" for number in sums) + " | |")
    lines.append("")
    survived = 100 * sums[1] / sums[0] if sums[0] else 0.0
    lines.append(
        f"{sums[0]} injections, {survived:.1f} % survived, {sums[2]} trajectories lost in silence, {sums[3]} trained "
        f"twice. Recorded in {recorded.seconds:.0f} s, from seed {recorded.seed} on."
    )
    if recorded.note:
        lines += ["", recorded.note]
    if recorded.failures:
        lines += ["", "Not survived:", ""]
        lines += [
            f"* `{failure.case}`, seed {failure.seed}: {failure.story}" for failure in recorded.failures
        ]
    return "\n".join(lines) + "\n"

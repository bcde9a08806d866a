"""What holds of every ended job, read from its segments and not from its own account of itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from syncline.runtime import segments


def trained(run: Path) -> Counter[str]:
    """Trajectory id -> in how many updates' segments it stands."""
    found: Counter[str] = Counter()
    for path in segment_files(run):
        found.update(row.trajectory.trajectory for row in segments.read(path).rows)
    return found


def segment_files(run: Path) -> list[Path]:
    """The segments of the job folder `run`, one per update, in order."""
    return sorted(p for p in (run / "segments").glob("update-*.parquet") if p.name.count(".") == 1)


def lags(run: Path) -> list[int]:
    """Lag of every trained trajectory, recomputed from its spans and the update that it stands in."""
    out = []
    for path in segment_files(run):
        update = int(path.stem.split("-")[1])
        out += [update - 1 - row.trajectory.oldest.number for row in segments.read(path).rows]
    return out


def sampled_under(run: Path) -> set[int]:
    """Numbers of the versions that any token in the segments was sampled under."""
    rows = [row for path in segment_files(run) for row in segments.read(path).members]
    return {span.version.number for row in rows for span in row.trajectory.spans}


def check(run: Path, summary: dict[str, Any], updates: int, max_lag: int) -> None:
    """The guarantees of a succeeded job."""
    assert summary["state"] == "succeeded", summary
    assert summary["updates"] == updates
    assert summary["lost"] == 0, summary
    assert summary["repeated"] == 0, summary
    assert summary["conservation_violations"] == 0, summary
    ledger = summary["ledger"]
    assert ledger["running"] == 0, ledger
    assert ledger["buffered"] == 0, ledger
    ends = ("running", "buffered", "trained", "filtered", "failed", "expired")
    assert ledger["submitted"] == sum(ledger[k] for k in ends), ledger
    counted = trained(run)
    assert len(segment_files(run)) == updates
    assert max(counted.values()) == 1, [t for t, n in counted.items() if n > 1]
    assert len(counted) == ledger["trained"], (len(counted), ledger)
    assert max(lags(run)) <= max_lag

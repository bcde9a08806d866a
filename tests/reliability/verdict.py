"""What must hold of every ended job, read from its weights and not from its own account of itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from field import Field
from fingerprint import GROUPS, uses

from syncline.contract.token_path import trajectory_id
from syncline.runtime import segments
from syncline.trainer.checkpoint import Checkpoints


@dataclass(frozen=True)
class Verdict:
    """repeated  trajectories that are in the weights more than once
    lost      that are neither in the weights nor ended by the ledger with a reason
    reported  that the ledger ended as filtered, failed or expired while the job ran, each with its reason
    """

    repeated: list[str]
    lost: list[str]
    reported: list[str]
    wrong: list[str] = field(default_factory=list)  # anything else that does not hold

    @property
    def clean(self) -> bool:
        return not (self.repeated or self.lost or self.wrong)


def judge(field: Field) -> Verdict:
    """Of a job that has finished and been ended."""
    size, spec = field.spec.batch.group_size, field.spec
    used = uses(field.folder / "export" / str(field.versions()[-1]), (GROUPS, size))
    cells = {(g, i): trajectory_id(field.job, g, i) for g in sorted(field.submitted) for i in range(size)}
    lines = field.ledger.entries(cells.values())
    repeated = [cells.get(cell, str(cell)) for cell, times in used.items() if times > 1]
    wrong = [f"{cell} is in the weights and was never submitted" for cell in used if cell not in cells]
    lost, reported = [], []
    for cell, name in cells.items():
        line = lines.get(name)
        if cell in used:
            if line is None or line.state != "trained":
                wrong.append(f"{name} is in the weights, the ledger says {line and line.state}")
        elif line is not None and line.state in ("filtered", "failed", "expired") and line.reason:
            if line.reason != "job ended":
                reported.append(f"{name} {line.state}: {line.reason}")
        else:
            lost.append(name)
    wrong += _ledger(field) + _files(field, used)
    if len(used) > spec.schedule.updates * spec.batch.groups * size:
        wrong.append(f"{len(used)} trajectories in the weights")
    return Verdict(repeated, lost, reported, wrong)


def _ledger(field: Field) -> list[str]:
    counts, counted = field.ledger.counts(), field.ledger.recount()
    wrong = [
        f"the ledger sums {counts[name]} {name} and has {number} lines of it"
        for name, number in counted.items()
        if counts[name] != number
    ]
    if not field.ledger.sample(0.0).holds:
        wrong.append(f"conservation: {counts}")
    return wrong


def _files(field: Field, used: dict[tuple[int, int], int]) -> list[str]:
    """Segments and the newest checkpoint say the same as the weights; the bound was kept."""
    folder, spec = field.folder / "segments", field.spec
    wrong = []
    seen: Counter[tuple[int, int]] = Counter()
    for update in segments.updates(folder):
        for row in segments.read(segments.segment_path(folder, update)).rows:
            seen[row.trajectory.group, row.trajectory.index] += 1
            if update - 1 - row.trajectory.oldest.number > spec.schedule.max_lag:
                wrong.append(f"{row.trajectory.trajectory} was trained over the lag bound")
    if seen != Counter(used):
        wrong.append("the segments do not say what the weights say")
    if segments.updates(folder) != list(range(1, spec.schedule.updates + 1)):
        wrong.append(f"segments of {segments.updates(folder)}")
    keep = spec.checkpoint.keep
    found = Checkpoints(
        field.folder / "checkpoints", field.job, spec.hash(), spec.contract_digest(), keep
    ).newest()
    if found.path is None or found.manifest is None:
        return [*wrong, "no whole checkpoint"]
    if uses(found.path, (GROUPS, spec.batch.group_size)) != used:
        wrong.append("the newest checkpoint does not hold the last weights")
    if found.manifest.version.number != spec.schedule.updates:
        wrong.append(f"the newest checkpoint is of {found.manifest.version}")
    return wrong


def leftovers(folder: Path) -> list[str]:
    """Half-written things that a finished job left behind."""
    return [str(path.relative_to(folder)) for path in folder.rglob(".*.part")]

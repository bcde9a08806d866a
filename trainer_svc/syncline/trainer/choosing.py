"""Which trajectories of an update are probed. Pure, and the same for the same job and update."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from syncline.runtime.segments import SegmentRow


def choose(rows: Sequence[SegmentRow], count: int, job: str, update: int) -> list[SegmentRow]:
    """At most `count` rows, spread over lag and the worker of the last span: one of each kind, then the next of each.

    Within a kind, and among kinds, a hash of job, update and trajectory decides.
    """

    def lot(text: str) -> bytes:
        return hashlib.sha256(f"{job}/{update}/{text}".encode()).digest()

    kinds: dict[tuple[int, str], list[SegmentRow]] = {}
    for row in sorted(rows, key=lambda row: lot(row.trajectory.trajectory)):
        kinds.setdefault((row.lag, row.trajectory.spans[-1].worker), []).append(row)
    order = sorted(kinds, key=lambda kind: lot(f"{kind[0]}/{kind[1]}"))
    deepest = max((len(of_kind) for of_kind in kinds.values()), default=0)
    turns = [kinds[kind][turn] for turn in range(deepest) for kind in order if turn < len(kinds[kind])]
    return turns[:count]

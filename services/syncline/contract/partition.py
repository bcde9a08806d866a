"""Whether a tensor-parallel split leaves every block whole. Blocks that straddle two ranks have two scales or none."""

from __future__ import annotations

import math
from typing import Literal

from syncline.contract.plan import BadPlan, PlanEntry, PrecisionPlan
from syncline.contract.schemes import BLOCK

Split = Literal["rows", "columns", "whole"]
SPLITS: dict[Split, tuple[str, ...]] = {
    "rows": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj"),
    "columns": ("o_proj", "down_proj", "w2", "out_proj"),
    "whole": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Along which axis of [N, K] a module's weight is cut: N (column-parallel), K (row-parallel), or not at all."""


def check_partition(plan: PrecisionPlan, tp: int, expert_tp: int | None = None) -> None:
    """Raises `BadPlan` naming the tensor, the shard, the block and the legal sizes of `tp`.

    expert_tp   over how many ranks one expert's weights are cut; None: `tp`
    """
    for key, size in (("tp", tp), ("expert_tp", tp if expert_tp is None else expert_tp)):
        if size < 1:
            raise BadPlan(f"{key} {size}: use at least 1", key)
    for entry in plan.low_bit():
        expert = ".experts." in entry.name
        key = "expert_tp" if expert and expert_tp is not None else "tp"
        size = expert_tp if expert and expert_tp is not None else tp
        if size > 1:
            _check(entry, size, key)


def split_of(name: str) -> Split | None:
    """How an engine cuts the weight `name`; None: not known."""
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return next((split for split, leaves in SPLITS.items() if leaf in leaves), None)


def legal_sizes(entry: PlanEntry) -> tuple[int, ...]:
    """Sizes of a tensor-parallel group that cut low-bit `entry` between blocks, smallest first; 1 always does."""
    split = split_of(entry.name)
    if split is None or split == "whole" or entry.weight is None:
        return (1,)
    length = entry.shape[0] if split == "rows" else entry.shape[1]
    step = _step(entry, split)
    return tuple(n for n in range(1, length + 1) if n == 1 or (length % n == 0 and length // n % step == 0))


def _step(entry: PlanEntry, split: Split) -> int:
    scheme = entry.weight
    assert scheme is not None
    if split == "rows":
        return scheme.rows
    along = BLOCK[scheme.format] or scheme.columns
    return math.lcm(along, 8) if scheme.format == "int4" else along  # eight int4 codes are one word


def _check(entry: PlanEntry, size: int, key: str) -> None:
    split = split_of(entry.name)
    if split is None:
        raise BadPlan(f"tensor {entry.name}: along which axis {key} {size} cuts it is not known; use 1", key)
    if split == "whole":
        return
    legal = legal_sizes(entry)
    if size not in legal:
        length = entry.shape[0] if split == "rows" else entry.shape[1]
        axis = "rows" if split == "rows" else "columns"
        shard = f"{length / size:g}"
        raise BadPlan(
            f"tensor {entry.name}: {key} {size} cuts its {length} {axis} into {shard}, no multiple of the block of "
            f"{_step(entry, split)}; legal: {', '.join(map(str, legal))}",
            key,
        )

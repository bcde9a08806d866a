"""What a study found, per trainer variant over its seeds: one row each, as a Markdown table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from syncline.lab.records import Cell, Point

LAST = 20
"""Updates at the end that the reward is averaged over, and the distance to the initial policy."""

NAMES = {
    "unquantised": "BF16 on both sides (yardstick)",
    "plain": "BF16 baseline",
    "forward_qdq": "forward fake quantisation",
    "qdq": "forward and backward fake quantisation",
    "real": "real low precision (emulated kernel)",
}
"""Variants in the order of the seed's Table 5, behind the unquantised pair."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One variant. Means over seeds; a figure per seed where it is a tuple, in the study's order of seeds.

    reward       mean of the last `LAST` updates, per seed
    gap_mean, gap_p99, exact, kl_rollout, clip, grad_norm   mean over all updates of that update's figure
    kl_same      k3 of the trainer's policy against the BF16 forward of the same weights: what quantisation alone moves
    kl_initial   k3 of the trainer's policy against the initial BF16 policy, over the last `LAST` updates
    """

    variant: str
    rewards: tuple[float, ...]
    reward: float
    gap_mean: float
    gap_p99: float
    exact: float
    kl_rollout: float
    kl_same: float
    kl_initial: float
    clip: float
    grad_norm: float
    entropy: float
    gap_per_seed: tuple[float, ...]
    kl_rollout_per_seed: tuple[float, ...]
    kl_same_per_seed: tuple[float, ...]


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """`study.json`: the findings and every cell that they were made of."""

    format: str
    recipe: str
    seeds: tuple[int, ...]
    updates: int
    last: int = LAST
    findings: tuple[Finding, ...]
    cells: tuple[Cell, ...]


def findings(cells: Sequence[Cell]) -> tuple[Finding, ...]:
    """One per variant that has cells, in the order of `NAMES`."""
    found = []
    for variant in NAMES:
        own = sorted((c for c in cells if c.order.variant == variant), key=lambda c: c.order.seed)
        if own:
            found.append(_finding(variant, own))
    return tuple(found)


def _finding(variant: str, cells: Sequence[Cell]) -> Finding:
    rewards = tuple(mean([p.reward for p in cell.points[-LAST:]]) for cell in cells)
    points = [point for cell in cells for point in cell.points]
    late = [point for cell in cells for point in cell.points[-LAST:]]
    return Finding(
        variant=variant,
        rewards=rewards,
        reward=mean(rewards),
        gap_mean=mean([p.gap.mean for p in points]),
        gap_p99=mean([p.gap.p99 for p in points]),
        exact=mean([p.gap.exact for p in points]),
        kl_rollout=mean([p.gap.kl for p in points]),
        kl_same=mean(_same(points)),
        kl_initial=mean([p.kl_initial for p in late if p.kl_initial is not None]),
        clip=mean([p.clip for p in points]),
        grad_norm=mean([p.grad_norm for p in points]),
        entropy=mean([p.entropy for p in late]),
        gap_per_seed=tuple(mean([p.gap.mean for p in cell.points]) for cell in cells),
        kl_rollout_per_seed=tuple(mean([p.gap.kl for p in cell.points]) for cell in cells),
        kl_same_per_seed=tuple(mean(_same(cell.points)) for cell in cells),
    )


def _same(points: Sequence[Point]) -> list[float]:
    return [p.kl_same for p in points if p.kl_same is not None]


def mean(values: Sequence[float]) -> float:
    """Mean, summed exactly. Raises `ValueError` for no values."""
    if not values:
        raise ValueError("the mean of nothing was asked for")
    return math.fsum(values) / len(values)


COLUMNS = (
    "trainer variant",
    "reward, last {last}",
    "per seed",
    "mean \\|diff\\|",
    "p99",
    "exact",
    "KL to rollout",
    "KL to BF16, same weights",
    "KL to initial BF16",
    "clipped",
    "gradient norm",
)


def table(study: Study) -> str:
    """The findings as a Markdown table, columns aligned."""
    last = min(study.last, study.updates)
    rows = [[column.format(last=last) for column in COLUMNS]]
    for f in study.findings:
        seeds = " / ".join(f"{reward:.3f}" for reward in f.rewards)
        small = (f.gap_mean, f.gap_p99)
        kls = (f.kl_rollout, f.kl_same, f.kl_initial)
        rows.append(
            [NAMES[f.variant], f"{f.reward:.3f}", seeds]
            + [short(value) for value in small]
            + [f"{100 * f.exact:.1f} %"]
            + [short(value) for value in kls]
            + [f"{100 * f.clip:.1f} %", f"{f.grad_norm:.2f}"]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def short(value: float) -> str:
    """Two significant digits; a plain 0 for what is exactly 0."""
    return "0" if value == 0 else f"{value:.2g}"

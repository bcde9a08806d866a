"""What one micro-batch gave to its update."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from syncline.numerics.route_agreement import RouteCounts
from syncline.trainer.engine import Sample
from syncline.trainer.loss import Tally


@dataclass(frozen=True)
class Part:
    """What one micro-batch gave; lists hold one entry per sample."""

    loss: float
    tally: Tally
    non_finite: list[str]
    logprobs: list[array[float]]
    weights: list[array[float]]
    routes: list[RouteCounts | None]


def unreadable(samples: Sequence[Sample], why: str) -> Part:
    """A micro-batch whose forward pass met an operand that no format can hold: no log-probs, and the reason."""
    return Part(
        loss=0.0,
        tally=Tally(),
        non_finite=[f"operand: {why}"],
        logprobs=[array("f", [math.nan] * len(s.positions)) for s in samples],
        weights=[array("f", [0.0] * len(s.positions)) for s in samples],
        routes=[None] * len(samples),
    )


def split(values_N: Tensor, lengths_B: Tensor) -> list[array[float]]:
    """One array('f') per row."""
    values, out, edge = values_N.tolist(), [], 0
    for length in lengths_B.tolist():
        out.append(array("f", values[edge : edge + length]))
        edge += length
    return out

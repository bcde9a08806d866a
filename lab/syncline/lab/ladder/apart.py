"""How far two scores of the same tokens are apart, and where most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.contract.token_path import Trajectory
from syncline.lab.ladder.records import Check
from syncline.lab.measure import flat

SUMS = 2e-5
"""Nats, mean over tokens."""
SUMS_SOURCE = "FP32 additions in another order, through a whole model"

Scores = Sequence[Sequence[float]]


def apart_N(one: Scores, other: Scores) -> NDArray[np.float64]:
    """|difference| of each of N tokens; what is not finite is infinitely far."""
    found = np.abs(np.array(flat(one), np.float64) - np.array(flat(other), np.float64))
    return np.where(np.isfinite(found), found, np.inf)


def gap(
    name: str, one: Scores, other: Scores, records: Sequence[Trajectory], *, bound: float, source: str
) -> Check:
    """The mean |difference| of log-probs [S] per record; `where` names the token at which it is largest."""
    apart = apart_N(one, other)
    found = float(apart.mean())
    where = "" if found <= bound else _worst(apart, records)
    return Check(name=name, found=found, bound=bound, source=source, unit="nats, mean", where=where)


def _worst(apart: NDArray[np.float64], records: Sequence[Trajectory]) -> str:
    at = int(apart.argmax())
    owners = [(record.trajectory, token) for record in records for token in range(record.sampled)]
    trajectory, token = owners[at]
    share = float((apart > apart.max() / 10).mean())
    return (
        f"{trajectory} token {token}: {apart[at]:.3g}; {100 * share:.0f} % of tokens are within a tenth of it"
    )

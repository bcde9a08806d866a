"""How far two scores of the same tokens are apart, and where most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.lab.ladder.records import Check
from syncline.lab.measure import Scores, flat

SUMS = 2e-5
"""Nats, mean over tokens."""
SUMS_SOURCE = "FP32 additions in another order, through a whole model"


def apart_N(one: Scores, other: Scores) -> NDArray[np.float64]:
    """|difference| of each of N tokens; what is not finite is infinitely far."""
    found = np.abs(np.array(flat(one), np.float64) - np.array(flat(other), np.float64))
    return np.where(np.isfinite(found), found, np.inf)


def gap(name: str, one: Scores, other: Scores, of: Sequence[str], *, bound: float, source: str) -> Check:
    """The mean |difference| of log-probs [S] of each of `of`; `where` names the token at which it is largest."""
    apart = apart_N(one, other)
    found = float(apart.mean())
    where = "" if found <= bound else _worst(apart, of, [len(part) for part in one])
    return Check(name=name, found=found, bound=bound, source=source, unit="nats, mean", where=where)


def _worst(apart: NDArray[np.float64], of: Sequence[str], lengths: Sequence[int]) -> str:
    at = int(apart.argmax())
    owners = [(name, n) for name, length in zip(of, lengths, strict=True) for n in range(length)]
    name, token = owners[at]
    share = float((apart > apart.max() / 10).mean())
    return f"{name} token {token}: {apart[at]:.3g}; {100 * share:.0f} % of tokens are within a tenth of it"

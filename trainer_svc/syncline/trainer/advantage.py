"""Group-relative advantages: GRPO (arXiv 2402.03300, with std) and Dr. GRPO (arXiv 2503.20783, without).

Pure Python in float64, summed exactly (`math.fsum`), so that the result does not depend on arrival order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

EPSILON = 1e-6
"""Added to the standard deviation, as verl does."""


def group_advantages(
    rewards: Sequence[float | None], kind: Literal["group_std", "group_mean"]
) -> list[float | None] | None:
    """Advantages of one group's members, in the order given.

    rewards   one entry per member; None or NaN: could not be scored. Such a member leaves the baseline and
              gets None: it must not be trained on.
    Returns None when fewer than two members were scored (there is no baseline to compare with), and exact
    zeros when all scored rewards are equal. The standard deviation is the sample one (n - 1).
    Raises ValueError for an infinite reward.
    """
    scored = [r for r in rewards if r is not None and not math.isnan(r)]
    for reward in scored:
        if math.isinf(reward):
            raise ValueError(f"reward {reward} is infinite: a scorer must return a finite number or None")
    if len(scored) < 2:
        return None
    baseline = math.fsum(r / len(scored) for r in scored)
    spread = max(scored) - min(scored)
    if spread == 0:
        return [None if _unscored(r) else 0.0 for r in rewards]
    divisor = 1.0
    if kind == "group_std":
        # squares are taken of numbers of order one, so that rewards of 1e200 do not overflow
        squares = math.fsum(((r - baseline) / spread) ** 2 for r in scored)
        divisor = spread * math.sqrt(squares / (len(scored) - 1)) + EPSILON
    return [None if r is None or math.isnan(r) else (r - baseline) / divisor for r in rewards]


def _unscored(reward: float | None) -> bool:
    return reward is None or math.isnan(reward)

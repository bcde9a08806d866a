"""Importance weights for tokens that another policy (an older version, another precision) sampled.

Shape legend: N loss tokens of a micro-batch, packed, no padding; B sequences. `lengths_B` sums to N.

With d = log pi_proximal - log mu_behaviour, detached:

token level      w = exp(d), one per token
sequence level   w = exp(sum of d over the sequence's loss tokens), the same for all its tokens

`truncate` clamps w into [low, high] (TIS, fengyao.notion.site/off-policy-rl); `mask` keeps w inside and
gives weight 0 outside (IcePop, arXiv 2510.18855); `none` is the full weight of decoupled PPO (arXiv
2505.24298).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 4.9e8. A log-ratio beyond this is clamped and counted; one inside is untouched, to the bit."""


def guarded_exp(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """exp that cannot overflow, and how many entries it had to clamp (int64 scalar).

    Without the guard exp(89) is inf in FP32 and inf * 0 is NaN, clipping or not. NaN goes in and comes out:
    it is reported by the non-finite guard and never clamped away.
    """
    clamped = (log_ratio.detach().abs() > MAX_LOG_RATIO).sum()
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), clamped


def sequence_sum(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Sum over each sequence, [B]; 0 for an empty one. Deterministic (segments are summed in order)."""
    if values_N.numel() == 0:
        return values_N.new_zeros(lengths_B.shape[0]) + values_N.sum()  # keeps the graph
    return torch.segment_reduce(values_N, "sum", lengths=lengths_B, unsafe=True)


def sequence_mean(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Mean over each sequence, [B]; 0 for an empty one."""
    return sequence_sum(values_N, lengths_B) / lengths_B.clamp(min=1)


@dataclass(frozen=True)
class Correction:
    """Which weight is wanted; field names as in the job spec's `loss.correction`."""

    kind: Literal["none", "truncate", "mask"]
    level: Literal["token", "sequence"]
    low: float
    high: float


@dataclass(frozen=True)
class Weights:
    """`weights_N` carry no gradient. `outside`: tokens whose raw weight lay outside [low, high]."""

    weights_N: Tensor
    outside: Tensor
    clamped: Tensor


def importance_weights(
    proximal_N: Tensor, behaviour_N: Tensor, lengths_B: Tensor, correction: Correction
) -> Weights:
    """Per-token weights, float32 [N], for `correction`."""
    log_ratio_N = (proximal_N - behaviour_N).detach()
    if correction.level == "sequence":
        raw_B, clamped = guarded_exp(sequence_sum(log_ratio_N, lengths_B))
        raw_N = raw_B.repeat_interleave(lengths_B)
    else:
        raw_N, clamped = guarded_exp(log_ratio_N)
    if correction.kind == "none":
        return Weights(raw_N, raw_N.new_zeros((), dtype=torch.int64), clamped)
    outside_N = (raw_N < correction.low) | (raw_N > correction.high)
    if correction.kind == "truncate":
        weights_N = raw_N.clamp(correction.low, correction.high)
    else:
        weights_N = torch.where(outside_N, torch.zeros_like(raw_N), raw_N)
    return Weights(weights_N, outside_N.sum(), clamped)

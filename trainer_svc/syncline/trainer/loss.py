"""Policy losses as pure functions of log-probabilities.

Shape legend: N loss tokens of a micro-batch, packed, no padding; B sequences; `lengths_B` sums to N. Tokens
outside the loss are not in N at all, so nothing they hold can leak into a sum.

Which policy the ratio is taken to: without a correction, the behaviour policy (the clip alone keeps the step
near what was sampled). With one, the *proximal* policy, which is the trainer's own score before the step; the
distance from there to the behaviour policy is then the correction's weight. `decoupled_ppo` always splits so.

ppo            arXiv 1707.06347; asymmetric clip: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729
gspo           arXiv 2507.18071: ratio of the sequence, geometric mean over its tokens
cispo          arXiv 2506.13585: the clipped ratio is a detached weight, every token keeps a gradient
decoupled_ppo  arXiv 2110.00641, as used in arXiv 2505.24298
KL k1, k2, k3  joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from syncline.trainer.corrections import (
    Correction,
    Weights,
    guarded_exp,
    importance_weights,
    sequence_mean,
)


@dataclass(frozen=True)
class Normaliser:
    """What a sum over loss tokens is divided by, counted over the whole update and never over a micro-batch.

    token_mean     1 / (all loss tokens)
    sequence_mean  1 / (sequences with a loss token) / (loss tokens of the token's own sequence)
    """

    name: Literal["token_mean", "sequence_mean"]
    tokens: int
    sequences: int

    @classmethod
    def over(cls, name: Literal["token_mean", "sequence_mean"], loss_tokens: Sequence[int]) -> Normaliser:
        """Count an update. `loss_tokens` holds the number of loss tokens of each of its sequences."""
        return cls(name, sum(loss_tokens), sum(1 for n in loss_tokens if n > 0))

    def total(self, values_N: Tensor, lengths_B: Tensor) -> Tensor:
        """This micro-batch's share of the update's mean: shares of all micro-batches add up to it. Scalar."""
        if self.name == "token_mean":
            return values_N.sum() / self.tokens
        return sequence_mean(values_N, lengths_B).sum() / self.sequences


@dataclass(frozen=True)
class LossSettings:
    """The job spec's `loss` branch, flat."""

    kind: Literal["ppo", "gspo", "cispo", "decoupled_ppo"]
    clip_low: float
    clip_high: float
    dual_clip: float | None
    entropy: float
    correction: Correction
    kl: float
    kl_estimator: Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class LossInputs:
    """float32 [N] each, except `lengths_B` (int64). Only `logprobs_N` and `entropy_N` carry a gradient.

    advantages_N   the sequence's advantage, repeated over its tokens
    proximal_N     the trainer's log-probs before the step
    behaviour_N    the log-probs recorded at sampling
    reference_N    of the reference policy; None: no KL asked for
    entropy_N      of the trainer's distribution at each token; None: not computed
    """

    logprobs_N: Tensor
    proximal_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    lengths_B: Tensor
    reference_N: Tensor | None = None
    entropy_N: Tensor | None = None


@dataclass(frozen=True)
class Tally:
    """Sums over tokens, to be added over micro-batches and divided once."""

    tokens: float = 0.0
    ratio: float = 0.0  # sum of ratios
    clipped: float = 0.0  # tokens whose clipped branch was taken
    clamped: float = 0.0  # exponents that the overflow guard clamped
    outside: float = 0.0  # tokens outside the correction's interval
    kl: float = 0.0
    k1: float = 0.0  # the three estimates of the same, whichever the loss asks for
    k2: float = 0.0
    k3: float = 0.0
    entropy: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Outcome(NamedTuple):
    """`loss`: scalar with gradient. `weights_N`: the correction's weights, None: none were applied."""

    loss: Tensor
    tally: Tally
    weights_N: Tensor | None


def kl_estimate(logprobs_N: Tensor, reference_N: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(policy, reference), [N], with its gradient."""
    match estimator:
        case "k1":
            return logprobs_N - reference_N
        case "k2":
            return 0.5 * (logprobs_N - reference_N).square()
        case "k3":
            log_ratio_N = reference_N - logprobs_N
            ratio_N, _ = guarded_exp(log_ratio_N)
            return ratio_N - log_ratio_N - 1


def clipped_objective(ratio_N: Tensor, advantages_N: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss [N], and which tokens took a clipped branch (bool [N])."""
    plain_N = -advantages_N * ratio_N
    bounded_N = -advantages_N * ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if settings.dual_clip is not None:
        ceiling_N = -advantages_N * settings.dual_clip
        negative_N = advantages_N < 0
        clipped_N = clipped_N | (negative_N & (loss_N > ceiling_N))
        loss_N = torch.where(negative_N, torch.minimum(loss_N, ceiling_N), loss_N)
    return loss_N, clipped_N


def policy_loss(inputs: LossInputs, settings: LossSettings, normaliser: Normaliser) -> Outcome:
    """The micro-batch's share of the update's loss, and its tally.

    Raises ValueError when the settings ask for something the inputs do not carry.
    """
    _require(inputs, settings)
    weights = _weights(inputs, settings)
    old_N = inputs.behaviour_N if weights is None else inputs.proximal_N
    log_ratio_N = inputs.logprobs_N - old_N
    if settings.kind == "gspo":
        log_ratio_N = sequence_mean(log_ratio_N, inputs.lengths_B).repeat_interleave(inputs.lengths_B)
    ratio_N, clamped = guarded_exp(log_ratio_N)
    if settings.kind == "cispo":
        weight_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high).detach()
        loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
        clipped_N = weight_N != ratio_N
    else:
        loss_N, clipped_N = clipped_objective(ratio_N, inputs.advantages_N, settings)
    if weights is not None:
        loss_N = loss_N * weights.weights_N
    kl = loss_N.new_zeros(())
    estimates: dict[str, float] = {}
    if inputs.reference_N is not None:
        kl_N = kl_estimate(inputs.logprobs_N, inputs.reference_N, settings.kl_estimator)
        loss_N = loss_N + settings.kl * kl_N
        kl = kl_N.detach().sum()
        estimates = _all_estimates(inputs.logprobs_N.detach(), inputs.reference_N)
    if inputs.entropy_N is not None and settings.entropy > 0:
        loss_N = loss_N - settings.entropy * inputs.entropy_N
    tally = Tally(
        tokens=float(loss_N.numel()),
        ratio=float(ratio_N.detach().sum()),
        clipped=float(clipped_N.sum()),
        clamped=float(clamped) + (0.0 if weights is None else float(weights.clamped)),
        outside=0.0 if weights is None else float(weights.outside),
        kl=float(kl),
        **estimates,
        entropy=0.0 if inputs.entropy_N is None else float(inputs.entropy_N.detach().sum()),
    )
    total = normaliser.total(loss_N, inputs.lengths_B)
    return Outcome(total, tally, None if weights is None else weights.weights_N)


def _all_estimates(logprobs_N: Tensor, reference_N: Tensor) -> dict[str, float]:
    names: tuple[Literal["k1", "k2", "k3"], ...] = ("k1", "k2", "k3")
    return {name: float(kl_estimate(logprobs_N, reference_N, name).sum()) for name in names}


def _weights(inputs: LossInputs, settings: LossSettings) -> Weights | None:
    """The correction's weights; None: the ratio goes straight to the behaviour policy."""
    if settings.correction.kind == "none" and settings.kind != "decoupled_ppo":
        return None
    return importance_weights(inputs.proximal_N, inputs.behaviour_N, inputs.lengths_B, settings.correction)


def _require(inputs: LossInputs, settings: LossSettings) -> None:
    if settings.kl > 0 and inputs.reference_N is None:
        raise ValueError("loss.kl.coefficient is set and there are no reference log-probs")
    if settings.entropy > 0 and inputs.entropy_N is None:
        raise ValueError("loss.entropy is set and there is no entropy")
    if settings.kind == "cispo" and settings.dual_clip is not None:
        raise ValueError("loss.dual_clip has no meaning for loss.kind 'cispo'")
    tokens = inputs.logprobs_N.shape[0]
    if int(inputs.lengths_B.sum()) != tokens:
        raise ValueError(f"lengths add up to {int(inputs.lengths_B.sum())}, log-probs are {tokens}")

"""What is measured on two executions of the same tokens. Natural logs; a gap is trainer minus rollout."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from syncline.contract.token_path import Trajectory
from syncline.trainer.loss import kl_estimate


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """|log-prob difference| over tokens, and the divergence that the same pairs estimate.

    exact   share of tokens whose two log-probs are the same FP32 number
    kl      k3 estimate of KL(rollout, trainer): the tokens are the rollout's, so this way round it is unbiased
    """

    tokens: int
    mean: float
    median: float
    p99: float
    max: float
    exact: float
    kl: float


def behaviour(records: Sequence[Trajectory]) -> list[array[float]]:
    """The log-probs that were recorded at sampling: rollout's decode path."""
    return [record.logprobs for record in records]


def flat(parts: Iterable[Sequence[float]]) -> Tensor:
    """All tokens in one tensor, float32 [N]."""
    return torch.tensor([value for part in parts for value in part], dtype=torch.float32)


def gap(trainer: Sequence[Sequence[float]], rollout: Sequence[Sequence[float]]) -> Gap:
    """The gap of log-probs [S] per trajectory, same order. Raises `ValueError` if lengths differ or there are none."""
    trainer_N, rollout_N = flat(trainer), flat(rollout)
    if trainer_N.shape != rollout_N.shape or not len(trainer_N):
        raise ValueError(f"{len(trainer_N)} trainer and {len(rollout_N)} rollout log-probs: no pairs")
    sizes_N = (trainer_N.double() - rollout_N.double()).abs()
    return Gap(
        tokens=len(sizes_N),
        mean=float(sizes_N.mean()),
        median=float(sizes_N.median()),
        p99=float(sizes_N.quantile(0.99)),
        max=float(sizes_N.max()),
        exact=float((trainer_N == rollout_N).double().mean()),
        kl=float(kl_estimate(rollout_N.double(), trainer_N.double(), "k3").mean()),
    )


def reference_kl(policy: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float:
    """k3 estimate of KL(policy, reference) over tokens that rollout sampled, as RL frameworks report it."""
    return float(kl_estimate(flat(policy).double(), flat(reference).double(), "k3").mean())

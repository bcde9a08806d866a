"""What is measured on two executions of the same tokens. Natural logs; a gap is trainer minus rollout."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from syncline.contract.token_path import Trajectory
from syncline.lab.records import Gap
from syncline.numerics.mismatch import kl_estimates, split, tail

Scores = Sequence[Sequence[float]]
"""Log-probs [S] of each of some trajectories."""


def behaviour(records: Sequence[Trajectory]) -> list[array[float]]:
    """The log-probs that were recorded at sampling: rollout's decode path."""
    return [record.logprobs for record in records]


def gap(trainer: Sequence[Sequence[float]], rollout: Sequence[Sequence[float]]) -> Gap:
    """The gap of log-probs [S] per trajectory, same order.

    Raises `ValueError` if there are no tokens, their numbers differ, or one is not finite.
    """
    trainer_N, rollout_N = flat(trainer), flat(rollout)
    if not trainer_N:
        raise ValueError("there are no tokens to compare")
    mismatch_N = split(trainer_N, rollout_N, rollout_N).mismatch_N
    sizes = tail(mismatch_N)
    return Gap(
        tokens=sizes.count,
        mean=sizes.mean,
        median=sizes.median,
        p99=sizes.p99,
        max=sizes.max,
        exact=float((mismatch_N == 0).double().mean()),
        kl=kl_estimates(mismatch_N)["k3"],
    )


def reference_kl(policy: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float:
    """k3 estimate of KL(policy, reference) over tokens that rollout sampled, as RL frameworks report it."""
    return kl_estimates(split(flat(reference), flat(policy), flat(policy)).mismatch_N)["k3"]


def flat(parts: Iterable[Sequence[float]]) -> list[float]:
    """All tokens in one list, [N]."""
    return [value for part in parts for value in part]

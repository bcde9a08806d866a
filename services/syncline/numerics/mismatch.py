"""How far two executions of one policy are apart, from log-probs of the same tokens. Pure functions in FP64.

Per token, with log pi_t of the trainer, log mu_t of rollout at the same version and log mu_tau as it was sampled:

    total = log pi_t - log mu_tau = (log pi_t - log mu_t) + (log mu_t - log mu_tau) = mismatch + staleness

Legend: N sampled tokens. Log-probs are natural logs under one temperature.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syncline.contract.diagnosis import Tail


@dataclass(frozen=True)
class Split:
    """float64 [N] each; `total` is `mismatch` + `staleness` up to FP64 rounding."""

    total_N: Tensor
    mismatch_N: Tensor
    staleness_N: Tensor


def split(trainer: Sequence[float], rollout: Sequence[float], behaviour: Sequence[float]) -> Split:
    """Take the gap apart.

    trainer     [N] log pi_t
    rollout     [N] log mu_t: the same tokens, scored by rollout at the trainer's version
    behaviour   [N] log mu_tau, recorded at sampling

    Raises `ValueError` if the lengths differ or a value is not finite.
    """
    pi_N, mu_N, tau_N = (_column(values) for values in (trainer, rollout, behaviour))
    if not len(pi_N) == len(mu_N) == len(tau_N):
        raise ValueError(
            f"log-probs of {len(pi_N)}, {len(mu_N)} and {len(tau_N)} tokens are of the same ones"
        )
    for name, values_N in (("trainer", pi_N), ("rollout", mu_N), ("behaviour", tau_N)):
        if not bool(values_N.isfinite().all()):
            at = int((~values_N.isfinite()).nonzero()[0, 0])
            raise ValueError(f"{name}: the log-prob of token {at} is {float(values_N[at])}")
    return Split(pi_N - tau_N, pi_N - mu_N, mu_N - tau_N)


def tail(differences_N: Tensor) -> Tail:
    """Mean, median, 99th percentile and largest of |difference|, and the signed mean; all 0 for no token.

    Percentiles are interpolated linearly between neighbours.
    """
    count = len(differences_N)
    if count == 0:
        return Tail(count=0, mean=0.0, median=0.0, p99=0.0, max=0.0, signed=0.0)
    sizes_N = differences_N.double().abs().sort().values
    return Tail(
        count=count,
        mean=float(sizes_N.mean()),
        median=_quantile(sizes_N, 0.5),
        p99=_quantile(sizes_N, 0.99),
        max=float(sizes_N[-1]),
        signed=float(differences_N.double().mean()),
    )


def mean_abs_by(differences_N: Tensor, keys: Sequence[Hashable]) -> dict[str, float]:
    """Mean |difference| per key, in the keys' first order. Raises `ValueError` unless there is a key per token."""
    sizes_N = differences_N.double().abs()
    return {str(key): float(sizes_N[at].mean()) for key, at in _places(differences_N, keys).items()}


def tail_by(differences_N: Tensor, keys: Sequence[Hashable]) -> dict[str, Tail]:
    """`tail` per key, in the keys' first order. Raises `ValueError` unless there is a key per token."""
    return {str(key): tail(differences_N[at]) for key, at in _places(differences_N, keys).items()}


def _places(differences_N: Tensor, keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    if len(keys) != len(differences_N):
        raise ValueError(f"{len(keys)} keys for {len(differences_N)} tokens")
    places: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return places


def position_bucket(index: int) -> str:
    """The bucket of the sampled token number `index`: "0-7", "8-15", then twice as wide each time."""
    if index < 8:
        return "0-7"
    low = 1 << (index.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def kl_estimates(mismatch_N: Tensor) -> dict[str, float]:
    """Estimates of KL(mu_t, pi_t) over tokens that mu sampled (joschu.net/blog/kl-approx.html); {} for no token.

    mismatch_N   log pi_t - log mu_t
    k1 = mean(-m), unbiased and signed; k2 = mean(m^2) / 2; k3 = mean(exp(m) - 1 - m), unbiased and never below 0.
    Unbiased only where the tokens' version is t itself: older ones were sampled by mu_tau.
    """
    if len(mismatch_N) == 0:
        return {}
    m_N = mismatch_N.double()
    return {
        "k1": float(-m_N.mean()),
        "k2": float(0.5 * m_N.square().mean()),
        "k3": float((torch.expm1(m_N) - m_N).mean()),
    }


def effective_sample_size(log_ratios_N: Tensor) -> float | None:
    """(sum w)^2 / (N sum w^2) of the weights w = exp(log ratio), in (0, 1]; None for no token.

    Shifted by the largest log-ratio, which cancels, so that nothing overflows.
    """
    if len(log_ratios_N) == 0:
        return None
    w_N = (log_ratios_N.double() - log_ratios_N.double().max()).exp()
    return float(w_N.sum().square() / (len(w_N) * w_N.square().sum()))


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _quantile(sorted_N: Tensor, q: float) -> float:
    """Of sorted values, without the size limit of `torch.quantile`."""
    place = q * (len(sorted_N) - 1)
    low = int(place)
    high = min(low + 1, len(sorted_N) - 1)
    return float(sorted_N[low] + (place - low) * (sorted_N[high] - sorted_N[low]))

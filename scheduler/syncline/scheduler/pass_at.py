"""pass@k and its interval: pure functions of counts per prompt.

The estimator is the unbiased one of Chen et al. 2021 (Evaluating Large Language Models Trained on Code, eq. 1): of a
prompt with n samples of which c are correct, 1 - C(n - c, k) / C(n, k) is the chance that k of them, drawn without
putting back, hold a correct one. Its mean over prompts is pass@k.

Prompts are what was drawn independently, samples of one prompt are not; so the interval is Wilson's with the number
of trials replaced by the effective one of a clustered sample (Korn and Graubard 1998; Franco et al. 2019): p (1 - p)
over the variance of the estimate p, which is taken from how prompts differ. Unlike a bootstrap it has a width where all
prompts agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

LEVEL = 0.95
Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)


def pass_at(k: int, n: int, c: int) -> float:
    """Of one prompt with `c` correct ones among `n` samples. Raises `ValueError` unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} correct ones among {n} samples is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def estimate(k: int, counts: Sequence[tuple[int, int]]) -> tuple[float, float, float] | None:
    """(pass@k, lower, upper) over the prompts with at least `k` samples; None: there is none.

    counts   (samples, correct ones) of each prompt
    """
    used = [(n, c) for n, c in counts if n >= k]
    if not used:
        return None
    values = [pass_at(k, n, c) for n, c in used]
    return fmean(values), *interval(values, sum(n // k for n, _ in used))


def interval(values: Sequence[float], most: int) -> tuple[float, float]:
    """Ends of the 95 % interval of the mean of `values`, each in [0, 1] and of one prompt.

    most   trials that the values can stand for at most, if samples of one prompt were as good as those of several
    """
    prompts, mean = len(values), fmean(values)
    spread = variance(values, mean) / prompts if prompts > 1 else 0.0
    agree = spread == 0.0 or mean in (0.0, 1.0)
    trials = float(prompts) if agree else min(max(mean * (1 - mean) / spread, 1.0), float(most))
    z = Z * _small(prompts)
    middle = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(mean * (1 - mean) / trials + z * z / (4 * trials * trials))
    return max(0.0, min(middle - half, mean)), min(1.0, max(middle + half, mean))


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Ends of the 95 % interval of the mean of values of any size, one of each prompt; None: fewer than two."""
    if len(values) < 2:
        return None
    half = Z * _small(len(values)) * math.sqrt(variance(values) / len(values))
    return fmean(values) - half, fmean(values) + half


def _small(prompts: int) -> float:
    """Student's quantile over the normal one (Cornish and Fisher, two terms): a variance from few prompts is unsure."""
    free = max(prompts - 1, 1)
    return 1 + (Z**2 + 1) / (4 * free) + (5 * Z**4 + 16 * Z**2 + 3) / (96 * free**2)

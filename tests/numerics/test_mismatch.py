"""The gap of a token taken apart sums exactly; tails, buckets, KL estimates and sample size are what they say."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.numerics import mismatch

LOGPROB = st.floats(-60.0, 0.0, width=32)
TRIPLES = st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB), max_size=60)
DIFFERENCES = st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=200)


@given(TRIPLES)
def test_the_parts_sum_to_the_total_on_each_token(triples: list[tuple[float, float, float]]) -> None:
    parts = mismatch.split(*([t[i] for t in triples] for i in range(3)))
    off = (parts.total_N - parts.mismatch_N - parts.staleness_N).abs()
    assert parts.total_N.dtype == torch.float64
    assert off.numel() == len(triples)
    assert not bool((off > 1e-6).any())
    assert not bool((off > 1e-12).any()), "FP64 leaves only its own rounding"


@pytest.mark.parametrize("which", range(3))
def test_what_is_not_finite_or_not_the_same_tokens_is_refused(which: int) -> None:
    columns = [[-1.0, -2.0, -3.0] for _ in range(3)]
    columns[which][1] = math.nan
    name = ("trainer", "rollout", "behaviour")[which]
    with pytest.raises(ValueError, match=f"{name}: the log-prob of token 1 is nan"):
        mismatch.split(*columns)
    columns[which] = [-1.0]
    with pytest.raises(ValueError, match="of the same ones"):
        mismatch.split(*columns)


@given(DIFFERENCES)
def test_a_tail_agrees_with_the_standard_library(values: list[float]) -> None:
    tail = mismatch.tail(torch.tensor(values, dtype=torch.float64))
    sizes = sorted(abs(v) for v in values)
    assert tail.count == len(values)
    assert tail.mean == pytest.approx(statistics.fmean(sizes), abs=1e-12)
    assert tail.median == pytest.approx(statistics.median(sizes), abs=1e-12)
    assert tail.max == sizes[-1]
    assert tail.signed == pytest.approx(statistics.fmean(values), abs=1e-12)
    if len(sizes) > 1:
        percentiles = statistics.quantiles(sizes, n=100, method="inclusive")
        assert tail.p99 == pytest.approx(percentiles[98], abs=1e-12)


def test_the_tail_of_nothing_counts_nothing() -> None:
    tail = mismatch.tail(torch.zeros(0))
    assert (tail.count, tail.mean, tail.max) == (0, 0.0, 0.0)


def test_position_buckets_double_and_have_no_gap() -> None:
    named = [mismatch.position_bucket(i) for i in range(70)]
    assert named[0] == named[7] == "0-7"
    assert named[8] == named[15] == "8-15"
    assert named[16] == named[31] == "16-31"
    assert named[64] == "64-127"
    for i, name in enumerate(named):
        low, high = map(int, name.split("-"))
        assert low <= i <= high


def test_means_by_key_are_of_the_tokens_with_that_key() -> None:
    differences = torch.tensor([1.0, -3.0, 0.5, -0.5])
    assert mismatch.mean_abs_by(differences, [0, 0, 1, 2]) == {"0": 2.0, "1": 0.5, "2": 0.5}
    with pytest.raises(ValueError, match="3 keys for 4 tokens"):
        mismatch.mean_abs_by(differences, [0, 1, 2])


@given(DIFFERENCES)
def test_k3_is_never_negative_and_all_vanish_together(values: list[float]) -> None:
    kl = mismatch.kl_estimates(torch.tensor(values, dtype=torch.float64))
    assert kl["k2"] >= 0
    assert kl["k3"] >= 0
    assert mismatch.kl_estimates(torch.zeros(5)) == {"k1": 0.0, "k2": 0.0, "k3": 0.0}


def test_the_estimates_find_a_known_divergence() -> None:
    """Tokens drawn from mu: k1 and k3 both estimate KL(mu, pi); the signs tell the direction."""
    generator = torch.Generator().manual_seed(3)
    mu, pi = (torch.log_softmax(torch.randn(8, generator=generator).double(), 0) for _ in range(2))
    exact = float((mu.exp() * (mu - pi)).sum())
    drawn = torch.multinomial(mu.exp(), 200_000, replacement=True, generator=generator)
    kl = mismatch.kl_estimates((pi - mu)[drawn])
    assert exact > 0.1
    assert kl["k1"] == pytest.approx(exact, rel=0.03)
    assert kl["k3"] == pytest.approx(exact, rel=0.03)


@given(DIFFERENCES)
def test_the_effective_sample_size_is_a_share(values: list[float]) -> None:
    size = mismatch.effective_sample_size(torch.tensor(values, dtype=torch.float64))
    assert size is not None
    assert 1 / len(values) - 1e-9 <= size <= 1 + 1e-9
    shifted = mismatch.effective_sample_size(torch.tensor(values, dtype=torch.float64) + 800.0)
    assert shifted == pytest.approx(size)


def test_equal_weights_keep_the_whole_sample() -> None:
    assert mismatch.effective_sample_size(torch.full((7,), -3.0)) == pytest.approx(1.0)
    assert mismatch.effective_sample_size(torch.zeros(0)) is None

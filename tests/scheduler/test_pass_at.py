"""pass@k against enumeration, and its interval against simulated truth."""

from __future__ import annotations

import random
from itertools import combinations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.scheduler.pass_at import estimate, interval, mean_interval, pass_at


@st.composite
def drawn(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 9))
    return draw(st.integers(1, n)), n, draw(st.integers(0, n))


@given(drawn())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one(case: tuple[int, int, int]) -> None:
    k, n, c = case
    samples = [i < c for i in range(n)]
    draws = list(combinations(samples, k))
    assert pass_at(k, n, c) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("k", "n", "c"), [(0, 4, 1), (5, 4, 1), (1, 4, 5), (1, 4, -1)])
def test_what_is_not_defined_is_refused(k: int, n: int, c: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at(k, n, c)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=40), st.integers(1, 8))
def test_an_estimate_lies_inside_its_interval(cases: list[tuple[int, int]], k: int) -> None:
    counts = [(n, min(n, c)) for n, c in cases]
    found = estimate(k, counts)
    used = [(n, c) for n, c in counts if n >= k]
    assert (found is None) == (not used)
    if found is not None:
        value, low, high = found
        assert 0 <= low <= value <= high <= 1
        assert low < high, "no sample is so large that nothing is unsure"
        assert value == pytest.approx(sum(pass_at(k, n, c) for n, c in used) / len(used))


def test_prompts_with_fewer_samples_than_k_are_left_out() -> None:
    assert estimate(2, [(1, 1), (1, 0)]) is None
    found = estimate(2, [(1, 1), (2, 0), (2, 0)])
    assert found is not None
    assert found[0] == 0


def test_samples_of_one_prompt_are_no_independent_trials() -> None:
    """64 prompts that agree with themselves say as much as 64 trials; 64 coins thrown four times say more."""
    same = estimate(1, [(4, 4 * (i % 2)) for i in range(64)])
    coins = estimate(1, [(4, 2)] * 32 + [(4, 1)] * 16 + [(4, 3)] * 16)
    assert same is not None
    assert coins is not None
    assert same[2] - same[1] > 1.8 * (coins[2] - coins[1])


@pytest.mark.parametrize("shape", [(1.0, 1.0), (0.3, 0.3), (5.0, 1.0), (0.3, 3.0), (50.0, 50.0)])
@pytest.mark.parametrize(("prompts", "samples", "k"), [(64, 4, 1), (64, 4, 4), (24, 8, 2)])
def test_intervals_cover_the_truth(shape: tuple[float, float], prompts: int, samples: int, k: int) -> None:
    """Prompts' chances are of a beta distribution, of which pass@k is known: 1 - E (1 - p)^k."""
    a, b = shape
    truth = 1 - prod((b + i) / (a + b + i) for i in range(k))
    rng = random.Random(f"{shape} {prompts} {samples} {k}")
    covered, runs = 0, 300
    for _ in range(runs):
        chances = [rng.betavariate(a, b) for _ in range(prompts)]
        counts = [(samples, sum(rng.random() < p for _ in range(samples))) for p in chances]
        found = estimate(k, counts)
        assert found is not None
        covered += found[1] <= truth <= found[2]
    assert covered / runs > 0.88  # 95 % but for chance, and for rates so near 1 that prompts seldom differ


def test_all_right_and_all_wrong_are_not_certain() -> None:
    assert interval([1.0] * 20, 80)[0] < 0.9
    assert interval([0.0] * 20, 80)[1] > 0.1
    assert interval([1.0], 4)[0] < 0.5


def test_the_interval_of_a_mean_reward_covers_it() -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(400):
        found = mean_interval([rng.gauss(2.0, 3.0) for _ in range(12)])
        assert found is not None
        covered += found[0] <= 2.0 <= found[1]
    assert 0.92 < covered / 400 < 0.98
    assert mean_interval([1.0]) is None

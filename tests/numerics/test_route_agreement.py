"""Agreement of two sides' routes, against counting by hand in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncline.numerics.route_agreement import (
    RouteCounts,
    first_diverging_layer,
    route_agreement,
    same_sets,
)


def routes(tokens: int, layers: int, topk: int, experts: int, seed: int) -> Tensor:
    """Random ids: `topk` different experts in each place, in random order."""
    r = random.Random(seed)
    return torch.tensor(
        [[r.sample(range(experts), topk) for _ in range(layers)] for _ in range(tokens)]
    ).reshape(tokens, layers, topk)


shapes = st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.integers(3, 5))


@given(shapes, st.integers(0, 10**6))
def test_agreement_is_what_counting_says(shape: tuple[int, int, int, int], seed: int) -> None:
    left, right = routes(*shape, seed), routes(*shape, seed + 1)
    tokens, layers = shape[:2]
    alike = [
        [set(left[n, i].tolist()) == set(right[n, i].tolist()) for i in range(layers)] for n in range(tokens)
    ]
    firsts = [row.index(False) if False in row else -1 for row in alike]
    assert same_sets(left, right).tolist() == alike
    assert first_diverging_layer(left, right).tolist() == firsts
    shares = [sum(row[i] for row in alike) / tokens for i in range(layers)]
    assert route_agreement(left, right).tolist() == pytest.approx(shares)
    counts = RouteCounts.of(left, right)
    assert counts.agreement == pytest.approx(tuple(shares))
    assert counts.first == tuple(firsts.count(i) for i in range(layers))


@given(shapes, st.integers(0, 10**6), st.data())
def test_counts_of_parts_add_up(shape: tuple[int, int, int, int], seed: int, data: st.DataObject) -> None:
    left, right = routes(*shape, seed), routes(*shape, seed + 1)
    cut = data.draw(st.integers(0, shape[0]))
    whole = RouteCounts.of(left, right)
    added = RouteCounts.of(left[:cut], right[:cut]) + RouteCounts.of(left[cut:], right[cut:])
    assert (added.tokens, added.equal, added.first) == (whole.tokens, whole.equal, whole.first)


def test_the_order_of_the_ids_of_a_token_has_no_meaning() -> None:
    left = routes(50, 3, 4, 8, 0)
    assert route_agreement(left, left.flip(-1)).tolist() == [1.0] * 3
    assert route_agreement(left.to(torch.uint8), left).tolist() == [1.0] * 3


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 2, 2\] and \[4, 2, 2\]"):
        route_agreement(routes(3, 2, 2, 4, 0), routes(4, 2, 2, 4, 0))
    with pytest.raises(ValueError, match="2 and of 3 routing layers"):
        RouteCounts(1, (1, 1), (0, 0)) + RouteCounts(1, (1, 1, 1), (0, 0, 0))


def test_no_token_has_no_agreement() -> None:
    counts = RouteCounts.of(routes(0, 2, 2, 4, 0), routes(0, 2, 2, 4, 0))
    assert counts.tokens == 0
    assert all(map(math.isnan, counts.agreement))


@pytest.mark.parametrize("by", [1, -1])
def test_a_record_that_stands_one_token_off_is_told(by: int) -> None:
    true = routes(14, 2, 2, 4, 0)
    assert RouteCounts.of(true, true.roll(by, 0)).shifted
    assert not RouteCounts.of(true, true).shifted


@given(st.integers(0, 10**6), st.floats(0, 1), st.integers(2, 60))
def test_a_record_that_stands_right_is_not_called_shifted(seed: int, noise: float, tokens: int) -> None:
    """However noisy, down to one that fits nowhere at all."""
    free, other = routes(tokens, 2, 2, 8, seed), routes(tokens, 2, 2, 8, seed + 1)
    r = random.Random(seed)
    noisy = torch.tensor([r.random() < noise for _ in range(tokens)])
    assert not RouteCounts.of(free, torch.where(noisy[:, None, None], other, free)).shifted


@pytest.mark.parametrize("by", [1, -1])
def test_routes_that_fit_nowhere_are_not_called_shifted_for_fitting_better_there(by: int) -> None:
    """Below chance where they stand, at two fifths one token off: a policy that has moved far."""
    free = routes(400, 2, 2, 8, 0)
    off = free.roll(by, 0)
    moved = torch.arange(400) % 5 < 2
    recorded = torch.where(moved[:, None, None], off, (free + 1) % 8)
    assert not RouteCounts.of(free, recorded).shifted
    assert RouteCounts.of(free, off).shifted


def test_one_token_repeated_fits_everywhere_and_is_not_called_shifted() -> None:
    same = routes(1, 4, 2, 8, 0).repeat(100, 1, 1)
    assert not RouteCounts.of(same, same).shifted

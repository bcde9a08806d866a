"""Drawing tokens: frequencies are the distribution's, cuts cut, log-probs follow the stated convention."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

from syncline.rollout.engine import Sampling
from syncline.rollout.engines.sampling import UNIFORMS, Cuts, Draws, draw

LOGITS_V = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0, -3.0])
STOPS = torch.tensor([4])
ROWS = 20_000


def drawn(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, suppress: Tensor | bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Share of each token over a grid of all uniform numbers, and the log-prob recorded for each token."""
    cuts = Cuts(
        torch.full((ROWS, 1), temperature),
        torch.full((ROWS, 1), top_p, dtype=torch.float64),
        torch.full((ROWS, 1), top_k),
        top_p < 1 or top_k > 0,
    )
    grid_R = (torch.arange(ROWS, dtype=torch.float64) + 0.5) / ROWS
    tokens_R, logprobs_R, _ = draw(LOGITS_V.expand(ROWS, -1), grid_R, cuts, suppress, STOPS)
    recorded_V = torch.full_like(LOGITS_V, float("nan"))
    recorded_V[tokens_R] = logprobs_R
    return torch.bincount(tokens_R, minlength=len(LOGITS_V)) / ROWS, recorded_V


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_frequencies_are_the_scaled_distribution(temperature: float) -> None:
    shares_V, recorded_V = drawn(temperature)
    expected_V = torch.softmax(LOGITS_V / temperature, dim=-1)
    assert torch.allclose(shares_V, expected_V, atol=2 / ROWS)
    there = ~recorded_V.isnan()
    assert torch.allclose(recorded_V[there], expected_V.log()[there], atol=1e-6)


@pytest.mark.parametrize(
    ("top_p", "top_k", "support"),
    [
        (1.0, 2, {0, 4}),
        (0.6, 0, {0, 4}),
        (0.5, 0, {0}),
        (1e-9, 0, {0}),
        (0.9, 3, {0, 2, 4}),
        (1.0, 99, set(range(6))),
    ],
)
def test_a_cut_keeps_the_proportions_and_the_uncut_log_probs(
    top_p: float, top_k: int, support: set[int]
) -> None:
    shares_V, recorded_V = drawn(top_p=top_p, top_k=top_k)
    full_V = torch.softmax(LOGITS_V, dim=-1)
    kept_V = torch.tensor([i in support for i in range(6)])
    assert torch.allclose(shares_V, torch.where(kept_V, full_V, 0) / full_V[kept_V].sum(), atol=2 / ROWS)
    there = ~recorded_V.isnan()
    assert torch.allclose(recorded_V[there], full_V.log()[there], atol=1e-6)


@pytest.mark.parametrize("suppress", [True, torch.ones(ROWS, dtype=torch.bool)], ids=["all", "row by row"])
def test_suppressed_stop_tokens_are_not_drawn_and_the_log_probs_do_not_see_it(
    suppress: Tensor | bool,
) -> None:
    shares_V, recorded_V = drawn(suppress=suppress)
    full_V = torch.softmax(LOGITS_V, dim=-1)
    assert shares_V[4] == 0
    assert shares_V[0].item() == pytest.approx(full_V[0].item() / (1 - full_V[4].item()), abs=2 / ROWS)
    assert recorded_V[0].item() == pytest.approx(full_V[0].log().item(), abs=1e-6)


def test_rows_with_and_without_cuts_do_not_touch_one_another() -> None:
    cuts = Cuts(torch.ones(2, 1), torch.ones(2, 1, dtype=torch.float64), torch.tensor([[1], [0]]), True)
    tokens_R, _, _ = draw(LOGITS_V.expand(2, -1), torch.tensor([0.999, 0.999]).double(), cuts, False, STOPS)
    assert tokens_R.tolist() == [0, 5]


def test_a_requests_numbers_follow_its_seed_alone() -> None:
    first, again, other = Draws((1, 2, 3, 1)), Draws((1, 2, 3, 1)), Draws((1, 2, 3, 2))
    torch.rand(7)
    for _ in range(3):
        numbers = first.uniforms()
        assert torch.equal(numbers, again.uniforms())
        assert len(numbers) == UNIFORMS
        assert numbers.max() < 1
    assert not torch.equal(Draws((1, 2, 3, 1)).uniforms(), other.uniforms())
    assert not torch.equal(Draws((11, 2, 3, 1)).uniforms(), Draws((1, 12, 3, 1)).uniforms())


def test_lognormal_lengths_have_their_median_and_keep_their_bounds() -> None:
    sampling = Sampling(length="lognormal", length_median=20, length_sigma=1.0, max_tokens=200, min_tokens=3)
    lengths = [Draws((0, group, 0, 1)).length(sampling) for group in range(2000)]
    assert all(least == most for least, most in lengths)
    assert statistics.median(most for _, most in lengths) == pytest.approx(20, abs=2)
    assert min(most for _, most in lengths) == 3
    assert max(most for _, most in lengths) == 200
    assert sum(most > 54 for _, most in lengths) / 2000 == pytest.approx(0.159, abs=0.03)  # one sigma above
    assert Draws((0,)).length(Sampling(max_tokens=9, min_tokens=4)) == (4, 9)

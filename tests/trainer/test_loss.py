"""What a loss must hold whatever the implementation: micro-batches, overflow, NaN, groups."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from syncline.trainer.advantage import group_advantages
from syncline.trainer.corrections import Correction, guarded_exp
from syncline.trainer.loss import LossInputs, LossSettings, Normaliser, kl_estimate, policy_loss

PLAIN = LossSettings(
    kind="ppo",
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    entropy=0.0,
    correction=Correction("none", "token", 0.0, 2.0),
    kl=0.0,
    kl_estimator="k3",
)
NORMALISERS: tuple[Literal["token_mean", "sequence_mean"], ...] = ("token_mean", "sequence_mean")
VARIANTS = {
    "ppo": PLAIN,
    "dual": dataclasses.replace(PLAIN, dual_clip=1.5),
    "gspo": dataclasses.replace(PLAIN, kind="gspo"),
    "cispo": dataclasses.replace(PLAIN, kind="cispo"),
    "decoupled": dataclasses.replace(PLAIN, kind="decoupled_ppo"),
    "truncate": dataclasses.replace(PLAIN, correction=Correction("truncate", "sequence", 0.5, 1.5)),
    "mask": dataclasses.replace(PLAIN, correction=Correction("mask", "token", 0.5, 1.5)),
    "kl": dataclasses.replace(PLAIN, kl=0.1),
    "entropy": dataclasses.replace(PLAIN, entropy=0.1),
}


def batch(seed: int, lengths: list[int]) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def draw() -> Tensor:
        return torch.randn(n, generator=g) * 0.3 - 1.5

    return LossInputs(
        logprobs_N=draw().requires_grad_(),
        proximal_N=draw(),
        behaviour_N=draw(),
        advantages_N=torch.randn(len(lengths), generator=g).repeat_interleave(torch.tensor(lengths)),
        lengths_B=torch.tensor(lengths),
        reference_N=draw(),
        entropy_N=torch.rand(n, generator=g),
    )


def part(whole: LossInputs, sequences: list[int]) -> tuple[LossInputs, Tensor]:
    """The micro-batch of `sequences` in that order, and where its tokens lie in the whole."""
    starts = torch.cumsum(whole.lengths_B, 0) - whole.lengths_B
    pieces = [torch.arange(int(starts[s]), int(starts[s] + whole.lengths_B[s])) for s in sequences]
    index = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)
    picked = {
        f.name: getattr(whole, f.name).detach()[index]
        for f in dataclasses.fields(whole)
        if f.name != "lengths_B"
    }
    picked["logprobs_N"].requires_grad_()
    return LossInputs(**picked, lengths_B=whole.lengths_B[sequences]), index


def gradient(
    whole: LossInputs, split: list[list[int]], settings: LossSettings, normaliser: Normaliser
) -> Tensor:
    out = torch.zeros_like(whole.logprobs_N)
    for sequences in split:
        inputs, index = part(whole, sequences)
        loss, _, _ = policy_loss(inputs, settings, normaliser)
        loss.backward()  # type: ignore[no-untyped-call]
        assert inputs.logprobs_N.grad is not None
        out[index] = inputs.logprobs_N.grad
    return out


@pytest.mark.parametrize("name", NORMALISERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_is_the_same_however_the_update_is_split(
    variant: str, name: Literal["token_mean", "sequence_mean"]
) -> None:
    lengths = [7, 1, 12, 3, 0, 9, 2]
    whole = batch(4, lengths)
    normaliser = Normaliser.over(name, lengths)
    splits = [
        [[0, 1, 2, 3, 4, 5, 6]],
        [[0, 1, 2], [3, 4, 5, 6]],
        [[5, 0], [6, 4, 2], [1, 3]],
        [[i] for i in range(7)],
    ]
    gradients = [gradient(whole, split, VARIANTS[variant], normaliser) for split in splits]
    assert float(gradients[0].abs().max()) > 1e-4
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-6, rtol=0)


def test_two_tokens_of_loss_one_and_ninety_eight_of_loss_nought_mean_a_fiftieth() -> None:
    normaliser = Normaliser.over("token_mean", [2, 98])
    ones, zeros = torch.ones(2), torch.zeros(98)
    shares = normaliser.total(ones, torch.tensor([2])) + normaliser.total(zeros, torch.tensor([98]))
    assert float(shares) == pytest.approx(0.02, abs=1e-9)
    by_sequence = Normaliser.over("sequence_mean", [2, 98])
    assert float(by_sequence.total(torch.cat([ones, zeros]), torch.tensor([2, 98]))) == pytest.approx(0.5)


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [89.0, -200.0, 1000.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_huge_log_ratio_gives_a_finite_loss_and_gradient(
    variant: str, log_ratio: float, advantage: float
) -> None:
    lengths = [1, 3]
    base = batch(1, lengths)
    inputs = dataclasses.replace(
        base,
        logprobs_N=torch.full((4,), -1.0).requires_grad_(),
        proximal_N=torch.full((4,), -1.0 - log_ratio / 2),
        behaviour_N=torch.full((4,), -1.0 - log_ratio),
        reference_N=torch.full((4,), -1.0 - log_ratio),
        advantages_N=torch.full((4,), advantage),
    )
    loss, tally, _ = policy_loss(inputs, VARIANTS[variant], Normaliser.over("token_mean", lengths))
    loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs_N.grad is not None
    assert math.isfinite(float(loss.detach()))
    assert bool(inputs.logprobs_N.grad.isfinite().all())
    assert tally.clamped > 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_a_huge_log_ratio_is_finite(estimator: Literal["k1", "k2", "k3"]) -> None:
    logprobs_N = torch.tensor([-1.0, -90.0]).requires_grad_()
    kl_estimate(logprobs_N, torch.tensor([-90.0, -1.0]), estimator).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs_N.grad is not None
    assert bool(logprobs_N.grad.isfinite().all())


def test_healthy_ratios_are_those_of_the_unguarded_formula_to_the_bit() -> None:
    log_ratio = torch.cat([torch.linspace(-19.99, 19.99, 4001), torch.tensor([0.0, -0.0, 1e-45])])
    guarded, clamped = guarded_exp(log_ratio)
    assert torch.equal(guarded, log_ratio.exp())
    assert int(clamped) == 0


@pytest.mark.parametrize("field", ["logprobs_N", "behaviour_N", "advantages_N"])
def test_nan_is_reported_and_not_clamped_away(field: str) -> None:
    base = batch(2, [4])
    bad = getattr(base, field).detach().clone()
    bad[2] = math.nan
    if field == "logprobs_N":
        bad.requires_grad_()
    loss, _, _ = policy_loss(
        dataclasses.replace(base, **{field: bad}), PLAIN, Normaliser.over("token_mean", [4])
    )
    assert math.isnan(float(loss.detach()))


def test_what_the_inputs_do_not_carry_is_refused_by_name() -> None:
    base = dataclasses.replace(batch(3, [4]), reference_N=None, entropy_N=None)
    normaliser = Normaliser.over("token_mean", [4])
    with pytest.raises(ValueError, match=r"loss\.kl\.coefficient"):
        policy_loss(base, VARIANTS["kl"], normaliser)
    with pytest.raises(ValueError, match=r"loss\.entropy"):
        policy_loss(base, VARIANTS["entropy"], normaliser)
    with pytest.raises(ValueError, match=r"loss\.dual_clip"):
        policy_loss(base, dataclasses.replace(PLAIN, kind="cispo", dual_clip=3.0), normaliser)
    with pytest.raises(ValueError, match="lengths add up to 3"):
        policy_loss(dataclasses.replace(base, lengths_B=torch.tensor([3])), PLAIN, normaliser)


# ---- groups ----------------------------------------------------------------------------------------
def test_unscored_members_leave_the_baseline() -> None:
    assert group_advantages([1.0, 0.0, None, 0.0], "group_mean") == pytest.approx(
        [2 / 3, -1 / 3, None, -1 / 3]
    )
    with_none = group_advantages([1.0, None, 0.0, math.nan], "group_std")
    without = group_advantages([1.0, 0.0], "group_std")
    assert with_none is not None
    assert without is not None
    assert [a for a in with_none if a is not None] == without
    assert with_none[1] is None
    assert with_none[3] is None


def test_a_group_of_equals_has_advantage_exactly_nought() -> None:
    assert group_advantages([0.1] * 3, "group_std") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rewards", [[1.0], [None, 1.0], [math.nan] * 4, []])
def test_fewer_than_two_scored_members_have_no_baseline(rewards: list[float | None]) -> None:
    assert group_advantages(rewards, "group_std") is None


def test_order_of_arrival_changes_nothing() -> None:
    rewards = [0.1, 0.7, 0.2, 1e-9, 0.3]
    forward = group_advantages(rewards, "group_std")
    backward = group_advantages(rewards[::-1], "group_std")
    assert forward is not None
    assert backward is not None
    assert forward == backward[::-1]


def test_large_rewards_stay_finite_and_infinite_ones_are_refused() -> None:
    large = group_advantages([1e200, -1e200, 0.0], "group_std")
    assert large == pytest.approx([1.0, -1.0, 0.0])
    with pytest.raises(ValueError, match="infinite"):
        group_advantages([math.inf, 0.0, 0.0], "group_mean")

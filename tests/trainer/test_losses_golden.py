"""Losses, gradients and advantages against three public implementations (see tests/golden/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.trainer.advantage import group_advantages
from syncline.trainer.corrections import Correction
from syncline.trainer.loss import LossInputs, LossSettings, Normaliser, kl_estimate, policy_loss

GOLDEN = Path(__file__).parents[1] / "golden"
LOSSES: dict[str, Any] = json.loads((GOLDEN / "losses.json").read_text())
PARTS: dict[str, Any] = json.loads((GOLDEN / "losses_parts.json").read_text())


def settings_of(raw: dict[str, Any]) -> LossSettings:
    rest = {k: v for k, v in raw.items() if k not in ("correction", "normaliser")}
    return LossSettings(**rest, correction=Correction(**raw["correction"]))


def packed(raw: dict[str, Any], settings: LossSettings) -> LossInputs:
    lengths_B = torch.tensor(raw["lengths"])
    return LossInputs(
        logprobs_N=torch.tensor(raw["logprobs"]).requires_grad_(),
        proximal_N=torch.tensor(raw["proximal"]),
        behaviour_N=torch.tensor(raw["behaviour"]),
        advantages_N=torch.tensor(raw["advantages"]).repeat_interleave(lengths_B),
        lengths_B=lengths_B,
        reference_N=torch.tensor(raw["reference"]) if settings.kl > 0 else None,
        entropy_N=torch.tensor(raw["entropy"]) if settings.entropy > 0 else None,
    )


@pytest.mark.parametrize(
    "case", LOSSES["cases"], ids=lambda c: f"{c['source']}-{c['name']}-{c['inputs']}".replace(" ", "_")
)
def test_loss_and_gradient_agree(case: dict[str, Any]) -> None:
    settings = settings_of(case["settings"])
    inputs = packed(LOSSES["inputs"][case["inputs"]], settings)
    normaliser = Normaliser.over(case["settings"]["normaliser"], inputs.lengths_B.tolist())
    loss, _, _ = policy_loss(inputs, settings, normaliser)
    loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs_N.grad is not None
    assert float(loss.detach()) == pytest.approx(case["loss"], abs=1e-5)
    torch.testing.assert_close(inputs.logprobs_N.grad, torch.tensor(case["grad"]), atol=1e-5, rtol=1e-5)


def test_the_cases_come_from_three_implementations_and_reach_every_branch() -> None:
    assert {c["source"] for c in LOSSES["cases"]} == {"verl", "openrlhf", "trl"}
    by_kind: dict[str, set[str]] = {}
    clipped = outside = 0.0
    for case in LOSSES["cases"]:
        settings = settings_of(case["settings"])
        inputs = packed(LOSSES["inputs"][case["inputs"]], settings)
        normaliser = Normaliser.over(case["settings"]["normaliser"], inputs.lengths_B.tolist())
        _, tally, _ = policy_loss(inputs, settings, normaliser)
        clipped += tally.clipped
        outside += tally.outside
        what = f"{settings.kind}/{settings.correction.kind}/{settings.correction.level}"
        by_kind.setdefault(what, set()).add(case["source"])
    assert clipped > 100
    assert outside > 100
    assert all(len(sources) >= 2 for sources in by_kind.values()), by_kind


@pytest.mark.parametrize("case", LOSSES["kl"], ids=lambda c: f"{c['estimator']}-{c['inputs']}")
def test_kl_estimators_agree(case: dict[str, Any]) -> None:
    raw = LOSSES["inputs"][case["inputs"]]
    logprobs_N = torch.tensor(raw["logprobs"]).requires_grad_()
    values_N = kl_estimate(logprobs_N, torch.tensor(raw["reference"]), case["estimator"])
    values_N.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(values_N.detach(), torch.tensor(case["values"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logprobs_N.grad, torch.tensor(case["grad"]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", PARTS["advantages"], ids=lambda c: f"{c['kind']}-{len(c['rewards'])}")
def test_advantages_agree(case: dict[str, Any]) -> None:
    ours = group_advantages(case["rewards"], case["kind"])
    assert ours == pytest.approx(case["advantages"], rel=1e-5, abs=1e-5)

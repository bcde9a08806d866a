"""Fake quantization in Megatron's layers, and canaries scored as rollout: as the torch engine under one contract."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conformance.trainer_engine import MODELS, distance, samples, spec_of, widest

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

from ranked import TOPOLOGIES, end_followers, exported, same_bytes, spec

from syncline.contract.recipes import RECIPES
from syncline.trainer.engine import TrainerEngine
from syncline.trainer.engines.megatron import ranks
from syncline.trainer.engines.megatron.engine import MegatronEngine
from syncline.trainer.engines.torch import TorchEngine

WEIGHT_ONLY = ("int4_qat_w4a16", "mxfp4_qat_w4a16")
ON_TP2 = pytest.mark.parametrize("topology", ["tp2"], scope="module")
"""Tests of one topology stand together, so that ranks are started once for them."""


@pytest.fixture(autouse=True, scope="module")
def no_followers_left() -> Iterator[None]:
    yield
    end_followers()


def in_fp32(recipe: str) -> dict[str, Any]:
    """The recipe with FP32 parameters, whose steps can be compared closer than BF16 tells."""
    custom = msgspec.to_builtins(RECIPES[recipe])
    custom["name"] = f"{recipe}_fp32"
    custom["trainer"] |= {"parameters": "fp32", "gather": "fp32"}
    custom["rollout"] |= {"wide": "fp32"}
    return {"custom": {key: value for key, value in custom.items() if value is not None}}


def pair(
    tmp: Path, topology: str, precision: dict[str, Any], model: str = "tiny-moe"
) -> tuple[TrainerEngine, ...]:
    """The engine on these ranks, and the torch engine, awake."""
    name = f"{topology}{len(list(tmp.iterdir()))}" if tmp.exists() else topology
    one = MegatronEngine(spec(TOPOLOGIES[topology], model, precision=precision), MODELS, tmp / f"{name}m")
    two = TorchEngine(spec_of(model, precision=precision), MODELS, tmp / f"{name}t")
    one.wake()
    two.wake()
    return one, two


def mean(left: Sequence[array[float]], right: Sequence[array[float]]) -> float:
    gaps = [abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(gaps) / len(gaps)


@pytest.mark.parametrize("topology", TOPOLOGIES, scope="module")
@pytest.mark.parametrize("recipe", WEIGHT_ONLY)
def test_fake_quantised_weights_score_and_step_as_the_torch_engines(
    topology: str, recipe: str, tmp_path: Path
) -> None:
    one, two = pair(tmp_path, topology, in_fp32(recipe))
    wide = TorchEngine(spec_of("tiny-moe", precision={"recipe": "fp32"}), MODELS, tmp_path / "w")
    wide.wake()
    some = samples()
    assert same_bytes(exported(one, tmp_path / "m0"), exported(two, tmp_path / "t0"))
    assert widest(one.score(some), two.score(some)) < 1e-5
    assert widest(one.score(some), wide.score(some)) > 1e-2, "wide values score otherwise"
    rollout = one.score(some, as_rollout=True)
    assert widest(rollout, two.score(some, as_rollout=True)) < 1e-5
    assert widest(rollout, one.score(some)) < 1e-5, "what is trained is what rollout holds"
    mine, theirs, plain = (engine.step(some, 1) for engine in (one, two, wide))
    assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    assert mine.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)
    left, right = exported(one, tmp_path / "m1"), exported(two, tmp_path / "t1")
    assert distance(left, right) < 1e-6
    assert distance(left, exported(wide, tmp_path / "w1")) > 1e-4
    # copies are made anew after a step
    assert widest(one.score(some), two.score(some)) < 1e-4


@pytest.mark.parametrize("topology", ["tp1", "tp2", "ep2", "pp2"], scope="module")
@pytest.mark.parametrize("variant", ["plain", "forward_qdq", "qdq"])
def test_activations_are_fake_quantised_too(topology: str, variant: str, tmp_path: Path) -> None:
    """Rounding decides on last bits, and the engines add up in another order, so a few codes differ by one step."""
    if (topology, variant) == ("tp2", "qdq"):
        with pytest.raises(
            ValueError, match=r"k_proj.weight: .* holds rows 0 to 16 of 32, which cuts a block of 32"
        ):
            pair(tmp_path, topology, {"recipe": "mxfp8", "variant": variant})
        return
    one, two = pair(tmp_path, topology, {"recipe": "mxfp8", "variant": variant})
    wide = TorchEngine(spec_of("tiny-moe"), MODELS, tmp_path / "w")
    wide.wake()
    some = samples()
    scores = one.score(some)
    far = mean(two.score(some, as_rollout=True), wide.score(some))
    assert far > 1e-2
    assert mean(scores, two.score(some)) < 0.05 * far
    assert mean(one.score(some, as_rollout=True), two.score(some, as_rollout=True)) < 0.05 * far
    if variant == "plain":
        assert mean(scores, wide.score(some)) < 1e-5
    mine, theirs, plain = (engine.step(some, 1) for engine in (one, two, wide))
    assert mine.grad_norm is not None
    assert theirs.grad_norm is not None
    assert plain.grad_norm is not None
    assert abs(mine.grad_norm - theirs.grad_norm) < max(
        1e-5 * theirs.grad_norm, 0.1 * abs(plain.grad_norm - theirs.grad_norm)
    )


@ON_TP2
def test_the_trace_is_what_ran_on_all_ranks(topology: str, tmp_path: Path) -> None:
    one, two = pair(tmp_path, topology, {"recipe": "int4_qat_w4a16"})
    mine, theirs = (
        {part.component: part for part in engine.step(samples(), 1).trace} for engine in (one, two)
    )
    for component in ("fprop", "dgrad", "wgrad"):
        found, wanted = ({u.family: u for u in t[component].uses} for t in (mine, theirs))
        assert found.keys() == wanted.keys() == {"linear", ""}
        assert found["linear"] == msgspec.structs.replace(
            wanted["linear"], persistent=found["linear"].persistent, communicated=found["linear"].communicated
        )
    assert "INT4" in mine["fprop"].uses[0].encoded


def test_a_weight_that_no_format_holds_is_named_and_the_step_skipped(tmp_path: Path) -> None:
    one, _ = pair(tmp_path, "tp1", {"recipe": "int4_qat_w4a16"})
    assert isinstance(one, MegatronEngine)
    awake: Any = ranks._current[0]._seat._engines[one._number].need()
    with torch.no_grad():
        awake.model.decoder.layers[0].self_attention.linear_proj.weight[0, 0] = torch.inf
    result = one.step(samples(), 1)
    assert result.skipped
    assert any("operand: " in name and "layers.0.self_attn.o_proj" in name for name in result.non_finite)


@ON_TP2
def test_a_cut_inside_a_block_is_refused_by_tensor(topology: str, tmp_path: Path) -> None:
    made = MegatronEngine(
        spec(TOPOLOGIES[topology], precision={"recipe": "unified_fp8", "variant": "qdq"}), MODELS, tmp_path
    )
    with pytest.raises(
        ValueError, match=r"tensor model.layers.0.self_attn.*cuts a block of 128; use fewer ranks"
    ):
        made.wake()


@ON_TP2
def test_a_frozen_low_bit_base_has_no_wgrad_and_is_what_rollout_holds(topology: str, tmp_path: Path) -> None:
    """K3's way on this engine's MoE: MXFP4 experts in rollout, a BF16 base in the trainer, an adapter that moves."""
    custom = {
        "name": "k3_tiny",
        "families": [{"name": "experts", "match": ["*.mlp.experts.*_proj.weight"], "weight": "mxfp4"}],
        "adapter": {"rank": 4, "alpha": 8.0, "targets": ["*.self_attn.[qkvo]_proj.weight"]},
    }
    one, two = pair(tmp_path, topology, {"custom": custom})
    some = samples()
    for update in (1, 2):
        mine, theirs = one.step(some, update), two.step(some, update)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
        assert {use.family for part in mine.trace if part.component == "wgrad" for use in part.uses} == {
            "adapter"
        }
    rollout = one.score(some, as_rollout=True)
    assert mean(rollout, two.score(some, as_rollout=True)) < 1e-3
    assert mean(rollout, one.score(some)) > 1e-2, "the trainer's base is wide, rollout's experts are codes"

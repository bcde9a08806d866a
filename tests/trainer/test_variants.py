"""The torch engine under every recipe and variant: what trains is what the contract says, judged from outside."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.trainer_engine import MODELS, distance, samples, spec_of, stranger, weights, widest
from safetensors.torch import load_file, save_file
from torch import Tensor

from syncline.contract.plan import BadPlan, PlanEntry, resolve
from syncline.contract.precision import Variant
from syncline.contract.recipes import RECIPES
from syncline.numerics.quantized import dequantize, outer_scale, quantize
from syncline.trainer.engines.torch import TorchEngine

LOW_BIT = ("unified_fp8", "mxfp8", "int4_qat_w4a16", "mxfp4_qat_w4a16", "nvfp4_w4a4")
WEIGHT_ONLY = ("int4_qat_w4a16", "mxfp4_qat_w4a16")
OWN_MODEL = {
    "tiny-hybrid": ("qwen38", "unified_fp8"),
    "tiny-glm": ("glm52", "nvfp4_selective"),
    "tiny-kimi": ("lora_frozen_mxfp4", "unified_fp8"),
}
VARIANTS: tuple[Variant, ...] = ("plain", "forward_qdq", "qdq", "real")


class Made:
    """An awake engine and what its first step gives."""

    def __init__(self, tmp: Path, model: str, precision: dict[str, Any], **parts: Any) -> None:
        self.engine = TorchEngine(spec_of(model, precision=precision, **parts), MODELS, tmp / "scratch")
        self.engine.wake()
        self.tmp = tmp

    def scores(self, as_rollout: bool = False) -> list[array[float]]:
        return self.engine.score(samples(), as_rollout)

    def gap(self) -> float:
        """Mean |trainer - rollout| log-prob at this version."""
        both = zip(self.scores(), self.scores(as_rollout=True), strict=True)
        gaps = [abs(a - b) for left, right in both for a, b in zip(left, right, strict=True)]
        return sum(gaps) / len(gaps)

    def stepped(self, name: str = "after") -> dict[str, Tensor]:
        """The weights after one more step."""
        result = self.engine.step(samples(), 1)
        assert not result.skipped
        return weights(self.engine, self.tmp / name)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    made = 0

    def build(model: str, precision: dict[str, Any], **parts: Any) -> Made:
        nonlocal made
        made += 1
        folder = tmp_path / str(made)
        folder.mkdir()
        return Made(folder, model, precision, **parts)

    return build


# ---- a plain trainer ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
@pytest.mark.parametrize("recipe", LOW_BIT)
def test_a_plain_trainer_is_the_bf16_trainer_to_the_bit(make: Any, model: str, recipe: str) -> None:
    """Its modules are swapped, since it scores as rollout, and multiply what torch multiplies."""
    base, plain = make(model, {"recipe": "bf16"}), make(model, {"recipe": recipe, "variant": "plain"})
    assert base.scores() == plain.scores()
    assert distance(base.stepped(), plain.stepped()) == 0.0
    assert base.gap() == 0.0
    assert plain.gap() > 1e-3


# ---- variants -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", LOW_BIT)
def test_variants_differ_where_they_should_and_agree_with_rollout(make: Any, recipe: str) -> None:
    made = {variant: make("tiny-moe", {"recipe": recipe, "variant": variant}) for variant in VARIANTS}
    scores = {variant: m.scores() for variant, m in made.items()}
    gaps = {variant: m.gap() for variant, m in made.items()}
    steps = {variant: m.stepped() for variant, m in made.items()}
    # forward: fake quantization and real execution read the same values, so they score alike
    assert widest(scores["plain"], scores["forward_qdq"]) > 1e-2
    assert scores["forward_qdq"] == scores["qdq"]
    assert gaps["plain"] > 1e-2
    assert all(gaps[variant] < 1e-3 for variant in VARIANTS[1:])
    # backward: each is another gradient
    assert distance(steps["forward_qdq"], steps["plain"]) > 1e-4
    assert distance(steps["qdq"], steps["forward_qdq"]) > 1e-5
    assert distance(steps["real"], steps["qdq"]) < distance(steps["qdq"], steps["forward_qdq"])


@pytest.mark.parametrize(("model", "recipe"), [(m, r) for m, rs in OWN_MODEL.items() for r in rs])
def test_families_train_in_their_recipes(make: Any, model: str, recipe: str) -> None:
    quantised = make(model, {"recipe": recipe, "variant": "real"})
    assert quantised.gap() < 2e-3
    assert make(model, {"recipe": recipe, "variant": "plain"}).gap() > 1e-3
    before = weights(quantised.engine, quantised.tmp / "before")
    assert distance(before, quantised.stepped()) > 0
    assert quantised.gap() < 2e-3  # copies were made anew


def test_every_recipe_of_a_model_is_tried_here() -> None:
    """A recipe that resolves nowhere above would be a recipe that no trainer test runs."""
    tried = {*LOW_BIT, *(r for rs in OWN_MODEL.values() for r in rs)}
    assert {name for name, contract in RECIPES.items() if contract.families} <= tried


# ---- scoring as rollout, judged by a stranger -----------------------------------------------------------------
@pytest.mark.parametrize("recipe", WEIGHT_ONLY)
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe", "tiny-hybrid"])
def test_rollouts_weights_are_the_exported_ones_quantised(make: Any, model: str, recipe: str) -> None:
    made = make(model, {"recipe": recipe})
    made.stepped("first")
    assert widest(made.scores(as_rollout=True), judged(made, recipe)) < 2e-5


def test_partners_share_an_outer_scale_across_modules_and_inside_one(make: Any) -> None:
    """q, k and v are three modules, an expert's gate and up two halves of one."""
    recipe = {**json.loads(json.dumps(tomled("nvfp4_w4a4"))), "name": "nvfp4_weight_only"}
    del recipe["families"][0]["activation"]
    recipe["trainer"] = {"fprop": {"right": "reconstructed"}, "dgrad": {"right": "reconstructed"}}
    for model in ("tiny-dense", "tiny-moe"):
        made = make(model, {"custom": recipe})
        made.stepped("first")
        assert widest(made.scores(as_rollout=True), judged(made, made.engine._contract)) < 2e-5
        assert widest(made.scores(), judged(made, made.engine._contract)) < 2e-5


def tomled(name: str) -> dict[str, Any]:
    import msgspec

    built: dict[str, Any] = msgspec.to_builtins(RECIPES[name])
    return built


def judged(made: Made, recipe: Any, wide: bool = False, bridge: bool = False) -> list[list[float]]:
    """Log-probs of plain transformers over the export, each low-bit checkpoint tensor quantised by itself.

    wide     tensors that stay wide are rounded to BF16;  bridge  and so is what is quantised
    """
    contract = RECIPES[recipe] if isinstance(recipe, str) else recipe
    folder = made.tmp / "judged"
    made.engine.export(folder)
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    plan = resolve(contract, {name: tuple(t.shape) for name, t in tensors.items()})
    if bridge:
        tensors = {name: t.bfloat16().float() for name, t in tensors.items()}
    changed = {name: t.bfloat16().float() if wide else t for name, t in tensors.items()}
    for entry in plan.low_bit():
        outer = shared(entry, plan.low_bit(), tensors)
        assert entry.weight is not None
        changed[entry.name] = dequantize(quantize(tensors[entry.name], entry.weight, entry.name, outer))
    assert wide or sum(not torch.equal(changed[name], tensors[name]) for name in tensors) == len(
        plan.low_bit()
    )
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    found = stranger(folder, samples())
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return found


def shared(entry: PlanEntry, entries: Sequence[PlanEntry], tensors: dict[str, Tensor]) -> Tensor | None:
    if not entry.outer or entry.weight is None:
        return None
    return outer_scale([tensors[e.name] for e in entries if e.outer == entry.outer], entry.weight)


# ---- gather ---------------------------------------------------------------------------------------------------
def gathering(**trainer: Any) -> dict[str, Any]:
    recipe = tomled("unified_fp8")
    return {
        **recipe,
        "name": "fp8_gather",
        "trainer": {**recipe["trainer"], "gather": "fp8_block", **trainer},
    }


def test_parameters_pass_through_fp8_where_it_is_gathered(make: Any) -> None:
    plain, made = make("tiny-moe", {"recipe": "unified_fp8"}), make("tiny-moe", {"custom": gathering()})
    assert distance(weights(plain.engine, plain.tmp / "w"), weights(made.engine, made.tmp / "w")) > 1e-4
    tensors = made.stepped()
    for entry in resolve(RECIPES["unified_fp8"], {n: tuple(t.shape) for n, t in tensors.items()}).entries:
        if entry.weight is not None:
            again = dequantize(quantize(tensors[entry.name], entry.weight, entry.name)).bfloat16().float()
            # BF16 keeps three bits more than the code: what was gathered is its own nearest code
            assert float((again - tensors[entry.name]).abs().max()) <= 2**-7 * float(again.abs().max())
    masters = made.engine._live.masters["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(masters.bfloat16().float(), tensors["model.layers.0.self_attn.q_proj.weight"])


# ---- refusals -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"parameters": "fp32"}, "trainer.gather 'fp8_block' with trainer.parameters 'fp32'"),
        ({"gather": "bf16", "adam_offload": True}, "trainer.adam_offload"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_name(
    make: Any, trainer: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make("tiny-dense", {"custom": gathering(**trainer)})


def test_a_contract_that_does_not_fit_the_model_is_refused_at_wake(make: Any) -> None:
    with pytest.raises(BadPlan, match=r"family experts: pattern '\*\.mlp\.experts"):
        make("tiny-dense", {"recipe": "nvfp4_selective"})
    with pytest.raises(
        ValueError, match=r"dgrad\.left is 'requantised' by 16 along N, and .*b_proj\.weight has 4 rows"
    ):
        make("tiny-kimi", {"custom": kimi_in_four_bits(), "variant": "qdq"})


def kimi_in_four_bits() -> dict[str, Any]:
    recipe = tomled("nvfp4_w4a4")
    return {
        **recipe,
        "name": "kimi",
        "families": [{**recipe["families"][0], "match": ["*.self_attn.b_proj.weight"]}],
    }


# ---- lifetime -------------------------------------------------------------------------------------------------
def test_sleep_changes_nothing(make: Any) -> None:
    made = make("tiny-moe", {"recipe": "unified_fp8"}, optimizer={"name": "adamw", "lr": 1e-3})
    made.stepped("first")
    before, rollout = made.scores(), made.scores(as_rollout=True)
    made.engine.sleep()
    made.engine.wake()
    assert made.scores() == before
    assert made.scores(as_rollout=True) == rollout


def test_scoring_as_rollout_leaves_training_as_it_was(make: Any) -> None:
    one, other = (make("tiny-moe", {"recipe": "unified_fp8"}) for _ in range(2))
    one.scores(as_rollout=True)
    assert one.scores() == other.scores()
    assert distance(one.stepped(), other.stepped()) == 0.0


def test_fp32_masters_are_quantised_as_they_are_exported(make: Any) -> None:
    """The artefact is made of the FP32 export; only what stays wide is rounded to BF16 in rollout."""
    recipe = {**tomled("int4_qat_w4a16"), "name": "fp32_int4"}
    recipe["trainer"] = {**recipe["trainer"], "parameters": "fp32", "gather": "fp32"}
    made = make("tiny-dense", {"custom": recipe})
    made.stepped("first")
    held, contract = made.scores(), made.engine._contract
    exact, bridged = judged(made, contract, wide=True), judged(made, contract, wide=True, bridge=True)
    assert widest(made.scores(as_rollout=True), exact) < 2e-5 < widest(exact, bridged)
    assert made.scores() == held


def test_an_operand_that_is_not_finite_skips_the_step_and_is_named(make: Any) -> None:
    made = make("tiny-dense", {"recipe": "unified_fp8"})
    with torch.no_grad():
        made.engine._live.masters["model.embed_tokens.weight"].fill_(torch.inf)
        made.engine._live._round()
    result = made.engine.step(samples(), 1)
    assert result.skipped
    assert any(name.startswith("operand: input of model.layers.0") for name in result.non_finite)
    assert result.trace[-1].uses[0].kernel == "none: the step was skipped"

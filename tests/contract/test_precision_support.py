"""The support matrix: whole, honest about what was run, and what decides at submit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems
from syncline.contract.precision import Gemm, Hardware, with_variant
from syncline.contract.precision_page import with_table
from syncline.contract.precision_words import components
from syncline.contract.recipes import RECIPES
from syncline.contract.schemes import SCHEMES
from syncline.contract.spec_text import parse_toml
from syncline.contract.support import decide, lookup
from syncline.contract.support_page import page
from syncline.contract.support_rules import (
    FORMATS,
    FRAMEWORKS,
    HARDWARE,
    KERNELS,
    MODELS,
    PATHS,
    RULES,
    Framework,
)

PAIR: tuple[Framework, Framework] = ("sglang", "transformer_engine")


def test_every_cell_has_a_rule_and_every_rule_a_cell() -> None:
    met = {
        id(lookup(*cell))
        for cell in itertools.product(FRAMEWORKS, HARDWARE, FORMATS, KERNELS, PATHS, [*MODELS, None])
    }
    unmet = [rule for rule in RULES if id(rule) not in met]
    assert unmet == []


def test_only_what_tests_here_run_is_called_run() -> None:
    for rule in RULES:
        if rule.evidence == "run":
            assert (rule.framework, rule.hardware) == ("reference", ("cpu",)), rule
        if rule.evidence != "unproven":
            assert rule.source, rule


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_runs_on_a_cpu_and_says_what_is_emulated(name: str) -> None:
    found = decide(RECIPES[name], "cpu")
    assert found.evidence == "run"
    assert found.kind == ("emulation" if RECIPES[name].families else "native")
    assert bool(found.emulations) == (found.kind == "emulation")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_selective", "lora_frozen_mxfp4", "qwen38"])
@pytest.mark.parametrize("hardware", ["ampere", "ada", "hopper"])
def test_there_is_no_native_microscaling_or_fp4_before_blackwell(name: str, hardware: Hardware) -> None:
    found = decide(RECIPES[name], hardware, *PAIR)
    assert found.kind == "refused"
    assert any("before Blackwell" in reason for reason in found.refusals)
    assert decide(RECIPES[name], "blackwell", *PAIR).kind == "native"
    assert decide(RECIPES[name], hardware).kind == "emulation"


@pytest.mark.parametrize(
    ("name", "hardware", "kind"),
    [
        ("bf16", "ampere", "native"),
        ("unified_fp8", "hopper", "native"),
        ("unified_fp8", "ampere", "refused"),
        ("unified_fp8", "blackwell", "refused"),  # the same flag is another function there
        ("glm52", "hopper", "native"),
        ("glm52", "blackwell", "native"),  # its trainer is BF16
        ("int4_qat_w4a16", "hopper", "native"),
        ("mxfp4_qat_w4a16", "blackwell", "refused"),  # no fake quantization of MXFP4 in Transformer Engine
        ("nvfp4_w4a4", "blackwell", "refused"),  # SGLang multiplies codes, the recipe dequantised operands
        ("unified_fp8", "cpu", "refused"),
    ],
)
def test_what_production_engines_have(name: str, hardware: Hardware, kind: str) -> None:
    assert decide(RECIPES[name], hardware, *PAIR).kind == kind


def test_blocks_with_power_of_two_scales_are_emulated_on_blackwell() -> None:
    recipe = RECIPES["unified_fp8"]
    family = msgspec.structs.replace(recipe.families[0], weight=SCHEMES["fp8_block_pow2"])
    found = decide(msgspec.structs.replace(recipe, families=(family,)), "blackwell", *PAIR)
    assert found.kind == "emulation"
    assert found.emulations == ("blockwise FP8 carried out by MXFP8 with power-of-two scales",)


def test_the_model_decides_where_the_kernels_are_of_one_family() -> None:
    int4, k3 = RECIPES["int4_qat_w4a16"], RECIPES["lora_frozen_mxfp4"]
    assert decide(int4, "hopper", *PAIR, model="dense").kind == "refused"
    assert decide(int4, "hopper", *PAIR, model="moe").evidence == "read"
    assert decide(k3, "blackwell", *PAIR, model="kimi").evidence == "read"
    assert decide(k3, "blackwell", *PAIR, model="moe").evidence == "unproven"


def test_a_frozen_base_has_no_wgrad() -> None:
    cells = decide(RECIPES["qwen38"], "cpu").cells
    assert {cell.path for cell in cells if cell.family == "experts"} == {"rollout", "fprop", "dgrad", "sync"}


def spec(precision: dict[str, Any], **device: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "run", "model": {"name": "tiny"}, "precision": precision, "device": device}
    )


def test_a_job_may_refuse_emulation() -> None:
    assert problems(spec({"recipe": "mxfp8"})) == []
    found = problems(spec({"recipe": "mxfp8", "emulation": False}))
    assert [p.path for p in found] == ["precision.emulation"]
    assert "FP32 partial sums" in found[0].message
    assert problems(spec({"recipe": "bf16", "emulation": False})) == []
    assert problems(spec({"recipe": "unified_fp8", "emulation": False}, hardware="hopper")) == []
    found = problems(spec({"recipe": "mxfp8", "emulation": False}, hardware="hopper"))
    assert [p.path for p in found] == ["precision.emulation"]


def test_the_page_is_up_to_date() -> None:
    written = (Path(__file__).resolve().parents[2] / "docs" / "support-matrix.md").read_text()
    assert written == page(), "run python -m syncline.contract.support_page"


def test_weight_only_nvfp4_experts_are_emulated_by_marlin() -> None:
    recipe = RECIPES["nvfp4_selective"]
    family = msgspec.structs.replace(recipe.families[0], activation=None)
    rollout = msgspec.structs.replace(recipe.rollout, kernel="dequantised")
    wide = msgspec.structs.replace(recipe.trainer, fprop=Gemm(), dgrad=Gemm(), wgrad=Gemm())
    contract = msgspec.structs.replace(recipe, families=(family,), rollout=rollout, trainer=wide)
    found = decide(contract, "hopper", *PAIR, model="moe")
    assert found.emulations == ("Marlin: FP4 expert weights decoded into BF16 GEMMs",)
    assert decide(contract, "hopper", *PAIR, model="dense").kind == "refused"


def test_the_table_of_recipes_is_up_to_date() -> None:
    written = (Path(__file__).resolve().parents[2] / "docs" / "precision.md").read_text()
    assert written == with_table(written), (
        "run python -m syncline.contract.precision_page < docs/precision.md"
    )


def test_words_follow_the_contract() -> None:
    fp8 = components(RECIPES["unified_fp8"])
    assert fp8["fprop"] == "fp8_block codes of X and W multiplied"
    assert components(with_variant(RECIPES["unified_fp8"], "plain"))["fprop"] == "BF16 values, wide GEMM"
    assert components(RECIPES["glm52"])["rollout"].endswith("KV cache fp8_e4m3")
    lora = components(RECIPES["qwen38"])
    assert (lora["wgrad"], lora["convert"]) == (
        "of the adapter alone, wide",
        "the adapter moves in BF16; the base never does",
    )


def test_the_custom_contract_of_the_page_is_one() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "precision.md").read_text()
    block = next(part for part in page.split("```") if "[precision.custom]" in part)
    spec = parse_toml(f'name = "run"\nmodel.name = "tiny"\n{block}')
    assert spec.contract().families[0].keep == ("model.layers.0.*",)

"""Contracts compiled to what each component takes: exact settings per recipe, and errors that name the key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from model_shapes import Shapes, dense, glm, kimi, moe

from syncline.contract.compile import CannotCompile
from syncline.contract.compile.megatron import MegatronSettings, megatron_flags
from syncline.contract.compile.parts import converter_plan, trainer_plan
from syncline.contract.compile.sglang import SGLangSettings, sglang_flags
from syncline.contract.plan import PrecisionPlan, resolve
from syncline.contract.precision import Gemm, PrecisionContract, with_variant
from syncline.contract.recipes import RECIPES, read

EXPERTS = {"name": "experts", "match": ["*.mlp.experts.*_proj.weight"]}
MODELS: dict[str, Shapes] = {"glm52": glm(), "lora_frozen_mxfp4": kimi()}


def plan_of(contract: PrecisionContract, shapes: Shapes | None = None) -> PrecisionPlan:
    return resolve(contract, shapes or MODELS.get(contract.name) or moe(1))


def custom(**keys: Any) -> PrecisionContract:
    return read({"name": "mine", **keys}, "mine")


# ---- SGLang ---------------------------------------------------------------------------------------------------
WIDE = ("--dtype", "bfloat16", "--kv-cache-dtype", "auto")
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras-per-batch", "2", "--lora-target-modules")
QKVO = ["k_proj", "o_proj", "q_proj", "v_proj"]
ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": QKVO, "bias": "none"}
ROUTER = ["lm_head", "model.layers.0.mlp.gate"]
ATTENTION = [f"model.layers.0.self_attn.{leaf}" for leaf in QKVO]
NVFP4_ENV = {
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "1",
    "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION": "1",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH": "1",
}
NVFP4_FLAGS = ("--quantization", "modelopt_fp4", "--moe-runner-backend", "flashinfer_trtllm_routed")
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": [*ROUTER, *ATTENTION]}


def fp8(method: str, block: list[int], kept: list[str]) -> dict[str, Any]:
    return {
        "quant_method": method,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": block,
        "modules_to_not_convert": kept,
    }


def compressed(form: str, kept: list[str], **weights: Any) -> dict[str, Any]:
    common = {"num_bits": 4, "group_size": 32, "symmetric": True, "strategy": "group", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": kept,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {**common, **weights},
            }
        },
    }


GLM_KEPT = sorted(
    ["lm_head", "model.layers.1.mlp.gate"]
    + [
        f"model.layers.{i}.self_attn.{leaf}"
        for i in (0, 1)
        for leaf in ("kv_b_proj", "indexer.weights_proj", "indexer.wq_b")
    ]
)
KIMI_KEPT = sorted(
    ["lm_head", "model.layers.1.block_sparse_moe.gate"]
    + [f"model.layers.{i}.self_attn.{leaf}" for i in (0, 1) for leaf in QKVO]
    + [f"model.layers.0.block_sparse_moe.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    + [
        f"model.layers.1.block_sparse_moe.shared_experts.{leaf}"
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
)
SGLANG: dict[str, tuple[tuple[str, ...], dict[str, Any] | None, dict[str, Any] | None]] = {
    "bf16": (WIDE, None, None),
    "fp32": (WIDE, None, None),
    "unified_fp8": (
        ("--dtype", "bfloat16", "--quantization", "fp8", "--kv-cache-dtype", "auto"),
        fp8("fp8", [128, 128], ROUTER),
        None,
    ),
    "glm52": (
        ("--dtype", "bfloat16", "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3"),
        fp8("fp8", [128, 128], GLM_KEPT),
        None,
    ),
    "mxfp8": (
        ("--dtype", "bfloat16", "--quantization", "mxfp8", "--kv-cache-dtype", "auto"),
        fp8("mxfp8", [1, 32], ROUTER),
        None,
    ),
    "int4_qat_w4a16": (
        ("--dtype", "bfloat16", "--quantization", "compressed-tensors", "--kv-cache-dtype", "auto"),
        compressed("pack-quantized", ROUTER, type="int", actorder=None),
        None,
    ),
    "nvfp4_selective": (("--dtype", "bfloat16", *NVFP4_FLAGS, "--kv-cache-dtype", "auto"), NVFP4, None),
    "qwen38": (
        ("--dtype", "bfloat16", *NVFP4_FLAGS, "--kv-cache-dtype", "auto", *LORA, *QKVO),
        NVFP4,
        ADAPTER,
    ),
    "lora_frozen_mxfp4": (
        (
            "--dtype",
            "bfloat16",
            "--quantization",
            "compressed-tensors",
            "--kv-cache-dtype",
            "auto",
            *LORA,
            *QKVO,
        ),
        compressed("mxfp4-pack-quantized", KIMI_KEPT, type="float"),
        ADAPTER,
    ),
}


@pytest.mark.parametrize("name", sorted(SGLANG))
def test_sglang_gets_exactly_these_settings(name: str) -> None:
    made = sglang_flags(RECIPES[name], plan_of(RECIPES[name]))
    assert (made.flags, made.quantization_config, made.adapter_config) == SGLANG[name]
    assert made.env == (NVFP4_ENV if "modelopt_fp4" in made.flags else {})
    assert made.complete


# ---- Megatron -------------------------------------------------------------------------------------------------
TE = ("--transformer-impl", "transformer_engine")
MEGATRON_NVFP4 = {
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
    "NVTE_NVFP4_DISABLE_RHT": "1",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
    "NVTE_USE_FAST_MATH": "0",
    "NVTE_BACKWARD_OVERRIDE": "dequantized",
}
MEGATRON: dict[str, tuple[tuple[str, ...], dict[str, str], dict[str, str] | None]] = {
    "bf16": (("--bf16",), {}, None),
    "fp32": ((), {}, None),
    "glm52": (("--bf16",), {}, None),
    "lora_frozen_mxfp4": (("--bf16",), {}, None),
    "qwen38": (("--bf16",), {}, None),
    "unified_fp8": (
        (*TE, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--bf16"),
        {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"},
        None,
    ),
    "mxfp8": ((*TE, "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--bf16"), {}, None),
    "nvfp4_selective": (
        (*TE, "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4", "--bf16"),
        MEGATRON_NVFP4,
        {"*.mlp.experts.linear_fc1": "nvfp4", "*.mlp.experts.linear_fc2": "nvfp4"},
    ),
}


@pytest.mark.parametrize("name", sorted(MEGATRON))
def test_megatron_gets_exactly_these_settings(name: str) -> None:
    made = megatron_flags(RECIPES[name], plan_of(RECIPES[name]))
    assert (made.flags, made.env, made.modules) == MEGATRON[name]
    assert made.adapter == RECIPES[name].adapter


def test_int4_is_fake_quantised_in_the_experts_alone() -> None:
    qat = custom(
        families=[{**EXPERTS, "weight": "int4_g128"}],
        trainer={
            "fprop": {"right": "reconstructed"},
            "dgrad": {"right": "reconstructed"},
            "operands": "bf16",
        },
    )
    made = megatron_flags(qat, plan_of(qat))
    assert made.env == {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_GROUP_SIZE": "128"}
    assert [caveat.partition(" ")[0] for caveat in made.caveats] == ["needs", "a"]


def test_outer_layers_that_stay_wide_are_a_flag() -> None:
    kept = custom(
        families=[
            {
                "name": "linear",
                "match": ["model.layers.*_proj.weight"],
                "keep": ["model.layers.0.*", "model.layers.[45].*"],
                "weight": "mxfp8",
                "activation": "mxfp8",
            }
        ],
        rollout={"kernel": "codes"},
        trainer={name: {"left": "codes", "right": "codes"} for name in ("fprop", "dgrad", "wgrad")},
    )
    made = megatron_flags(kept, plan_of(kept, dense(6)))
    wanted = ("--num-layers-at-start-in-bf16", "1", "--num-layers-at-end-in-bf16", "2")
    assert made.flags[-5:] == ("--first-last-layers-bf16", *wanted)
    assert made.modules is None
    config = sglang_flags(kept, plan_of(kept, dense(6))).quantization_config
    assert config is not None
    assert {name.split(".")[2] for name in config["modules_to_not_convert"] if "." in name} == {"0", "4", "5"}


def test_parameter_gather_and_offload_have_flags_of_their_own() -> None:
    gathered = read({**_fp8(), "trainer": {**_codes(), "gather": "fp8_block"}}, "mine")
    assert "--fp8-param-gather" in megatron_flags(gathered).flags
    offloaded = read({**_fp8(), "trainer": {**_codes(), "adam_offload": True}}, "mine")
    assert "--optimizer-cpu-offload" in megatron_flags(offloaded).flags


def _fp8(**family: Any) -> dict[str, Any]:
    linear = {"name": "linear", "match": ["model.layers.*_proj.weight"], "weight": "fp8_block"}
    return {
        "name": "mine",
        "families": [{**linear, "activation": "fp8_tile", **family}],
        "rollout": {"kernel": "codes"},
        "trainer": _codes(),
    }


def _codes() -> dict[str, Any]:
    return {name: {"left": "codes", "right": "codes"} for name in ("fprop", "dgrad", "wgrad")}


# ---- refusals -------------------------------------------------------------------------------------------------
def _changed(**keys: Any) -> PrecisionContract:
    return read({**_fp8(), **keys}, "mine")


MIXED = [
    {"name": "a", "match": ["*.self_attn.*_proj.weight"], "weight": "fp8_block", "activation": "fp8_tile"},
    {"name": "b", "match": ["*.mlp.experts.*_proj.weight"], "weight": "mxfp8", "activation": "mxfp8"},
]
_ANEW = {"left": "requantised", "right": "requantised"}
INT4 = {"name": "linear", "match": ["model.layers.*_proj.weight"], "weight": "int4_g32"}
ODD = {**INT4, "weight": {"format": "int4", "rows": 1, "columns": 16, "rule": "amax/7"}}
REFUSED_SGLANG: list[tuple[str, PrecisionContract, str]] = [
    ("two formats", _changed(families=MIXED), "families.1.weight"),
    ("wide fp32", _changed(rollout={"kernel": "codes", "wide": "fp32"}), "rollout.wide"),
    ("bridge", _changed(convert={"route": "bf16_bridge"}), "convert.route"),
    ("fp8 decoded", _changed(rollout={}), "rollout.kernel"),
    ("fp8 weight-only", read({**_fp8(activation=None), "trainer": {}}, "mine"), "families.0.activation"),
    ("fp8 tiles as blocks", read(_fp8(weight="fp8_tile"), "mine"), "families.0.weight"),
    ("int4 multiplied", custom(families=[INT4], rollout={"kernel": "codes"}), "rollout.kernel"),
    ("int4 with activations", custom(families=[{**INT4, "activation": "int4_g32"}]), "families.0.activation"),
    ("int4 by 16", custom(families=[ODD]), "families.0.weight.columns"),
    ("mxfp4 beyond experts", RECIPES["mxfp4_qat_w4a16"], "families.0.match"),
    ("nvfp4 dequantised", RECIPES["nvfp4_w4a4"], "rollout.kernel"),
    (
        "half a fused layer",
        read({**_fp8(match=["*.self_attn.[qo]_proj.weight"])}, "mine"),
        "families.0.match",
    ),
    (
        "half of a layer's experts",
        read({**_fp8(match=["*.mlp.experts.0.*_proj.weight"])}, "mine"),
        "families.0.match",
    ),
]
FLOOR = {"format": "mxfp8", "rows": 1, "columns": 32, "rule": "floor"}
SMALL = {"format": "fp8_block", "rows": 64, "columns": 64, "rule": "pow2"}
RECIPROCAL = {"format": "fp8_block", "rows": 128, "columns": 128, "rule": "448/amax"}
FOUR = {**EXPERTS, "weight": "nvfp4", "activation": "nvfp4_row", "fuse": [["gate_proj", "up_proj"]]}
FPROP = {"left": "codes", "right": "codes"}
REFUSED_MEGATRON: list[tuple[str, PrecisionContract, str]] = [
    ("two formats", _changed(families=MIXED), "families.1.weight"),
    ("fp32 parameters", _changed(trainer={**_codes(), "parameters": "fp32"}), "trainer.parameters"),
    ("fp32 gather", _changed(trainer={**_codes(), "gather": "fp32"}), "trainer.gather"),
    ("fp8 gather without fp8 GEMMs", _changed(trainer={"gather": "fp8_block"}), "trainer.gather"),
    ("fake fp8", with_variant(RECIPES["unified_fp8"], "forward_qdq"), "trainer.fprop"),
    ("fp8 with a wide backward", _changed(trainer={"fprop": FPROP}), "trainer.dgrad"),
    ("64x64 blocks", read(_fp8(weight=SMALL), "mine"), "families.0.weight"),
    ("reciprocal scales", read(_fp8(weight=RECIPROCAL), "mine"), "families.0.weight.rule"),
    ("floor scales", _changed(families=[{**MIXED[1], "weight": FLOOR}]), "families.0.weight.rule"),
    ("fake mxfp4", RECIPES["mxfp4_qat_w4a16"], "families.0.weight.format"),
    ("fake nvfp4", RECIPES["nvfp4_w4a4"], "trainer.fprop"),
    ("int4 beyond experts", RECIPES["int4_qat_w4a16"], "families.0.match"),
    ("int4 with a wide DGrad", with_variant(RECIPES["int4_qat_w4a16"], "forward_qdq"), "trainer.fprop"),
    (
        "nvfp4 with two backward passes",
        custom(families=[FOUR], trainer={"fprop": FPROP, "dgrad": {"right": "reconstructed"}}),
        "trainer.wgrad",
    ),
    (
        "nvfp4 quantised anew",
        custom(families=[FOUR], trainer={**_codes(), "dgrad": _ANEW, "wgrad": _ANEW}),
        "trainer.dgrad",
    ),
]
REFUSED = [(name, sglang_flags, c, key) for name, c, key in REFUSED_SGLANG] + [
    (name, megatron_flags, c, key) for name, c, key in REFUSED_MEGATRON
]


@pytest.mark.parametrize(
    ("compile", "contract", "key"),
    [r[1:] for r in REFUSED],
    ids=[f"{r[1].__name__}: {r[0]}" for r in REFUSED],
)
def test_what_has_no_setting_is_refused_with_the_contracts_key(
    compile: Callable[[PrecisionContract, PrecisionPlan], SGLangSettings | MegatronSettings],
    contract: PrecisionContract,
    key: str,
) -> None:
    with pytest.raises(CannotCompile) as caught:
        compile(contract, plan_of(contract))
    assert caught.value.key == key


def test_rows_of_a_fused_fp8_layer_fill_whole_blocks() -> None:
    odd = {**moe(1), "model.layers.0.self_attn.k_proj.weight": (64, 256)}
    contract = RECIPES["unified_fp8"]
    with pytest.raises(CannotCompile, match=r"k_proj\.weight has 64 rows"):
        sglang_flags(contract, resolve(contract, odd))


def test_a_wide_layer_between_low_bit_ones_has_no_flag() -> None:
    contract = read(_fp8(keep=["model.layers.1.*"]), "mine")
    with pytest.raises(CannotCompile, match="between low-bit layers"):
        megatron_flags(contract, resolve(contract, dense(3)))


def test_a_plan_of_another_contract_is_refused() -> None:
    plan = plan_of(RECIPES["mxfp8"])
    for compile in (sglang_flags, megatron_flags, converter_plan, trainer_plan):
        with pytest.raises(ValueError, match="the plan is of contract"):
            compile(RECIPES["bf16"], plan)


def test_without_a_plan_a_preview_says_that_it_is_one() -> None:
    for compile in (sglang_flags, megatron_flags):
        assert not compile(RECIPES["mxfp8"]).complete


# ---- converter and trainer ------------------------------------------------------------------------------------
def test_the_converter_makes_the_parts_that_the_engine_loads() -> None:
    contract = RECIPES["nvfp4_selective"]
    made = {c.source: c for c in converter_plan(contract, plan_of(contract))}
    gate = made["model.layers.0.mlp.experts.0.gate_proj.weight"]
    assert [part.name.removeprefix(gate.source) for part in gate.parts] == ["", "_scale", "_scale_2"]
    up = made["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert gate.outer == up.outer == "model.layers.0.mlp.experts.0.gate_proj+up_proj"
    wide = made["model.layers.0.self_attn.q_proj.weight"]
    assert (wide.weight, [part.dtype for part in wide.parts]) == (None, ["BF16"])


def test_over_a_bf16_bridge_everything_is_converted_to_bf16() -> None:
    contract = _changed(convert={"route": "bf16_bridge"})
    made = converter_plan(contract, plan_of(contract))
    assert {part.dtype for c in made for part in c.parts} == {"BF16"}
    assert all(c.weight is None for c in made)


def test_the_trainer_sets_three_gemms_per_tensor() -> None:
    contract = RECIPES["int4_qat_w4a16"]
    made = {t.name: t for t in trainer_plan(contract, plan_of(contract))}
    low = made["model.layers.0.self_attn.q_proj.weight"]
    assert (low.fprop, low.dgrad, low.wgrad) == (
        Gemm(right="reconstructed"),
        Gemm(right="reconstructed"),
        Gemm(),
    )
    router = made["model.layers.0.mlp.gate.weight"]
    assert (router.fprop, router.wgrad, router.family) == (Gemm(), Gemm(), "")


def test_under_an_adapter_nothing_else_trains() -> None:
    contract = RECIPES["qwen38"]
    made = trainer_plan(contract, plan_of(contract))
    assert {t.wgrad for t in made} == {None}
    assert {t.name.rsplit(".", 2)[1] for t in made if t.adapter} == {"q_proj", "k_proj", "v_proj", "o_proj"}

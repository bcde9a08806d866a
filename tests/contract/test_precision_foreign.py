"""Contradictions that public recipes shipped with, fed as their two sides: each is named by the key that differs."""

from __future__ import annotations

from typing import Any

import pytest
from model_shapes import moe

from syncline.contract.compile.megatron import megatron_flags
from syncline.contract.compile.sglang import sglang_flags
from syncline.contract.foreign import cross_check, lift_rollout, lift_trainer
from syncline.contract.plan import resolve
from syncline.contract.recipes import RECIPES

BLOCKWISE = {"flags": {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise"}}


def fp8(rows: int, columns: int, **more: Any) -> dict[str, Any]:
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns], **more}
    return {"quantization_config": config}


def int4(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return {"quantization_config": config}


def found(rollout: dict[str, Any], trainer: dict[str, Any]) -> dict[str, str]:
    return {problem.path: problem.message for problem in cross_check(rollout, trainer)}


def test_groups_of_32_in_the_converter_and_128_in_fake_quantisation() -> None:
    qat = {"env": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_GROUP_SIZE": "128"}}
    told = found(int4(32), qat)
    assert told.keys() == {"weight.columns"}
    assert "group_size says 32, OPEN_TRAINING_INT4_GROUP_SIZE says 128" in told["weight.columns"]
    assert found(int4(128), qat) == {}


def test_the_group_size_that_nobody_set_is_128() -> None:
    assert "weight.columns" in found(int4(32), {"env": {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}})


def test_an_fp8_rollout_in_squares_and_an_mxfp8_trainer() -> None:
    told = found(fp8(128, 128), {"flags": {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"}})
    assert told.keys() == {"weight.format"}
    assert "fp8_block" in told["weight.format"]
    assert "mxfp8" in told["weight.format"]


def test_a_rollout_flag_that_leaves_the_rollout_in_bf16() -> None:
    told = found({"quantization_config": None, "flags": {"--rollout-mxfp8": True}}, {"flags": {}})
    assert told.keys() == {"--rollout-mxfp8"}
    assert "BF16" in told["--rollout-mxfp8"]
    assert found(fp8(1, 32, quant_method="mxfp8"), {"flags": {}}) == {}


def test_a_trainer_flag_that_leaves_the_trainer_in_bf16() -> None:
    assert found({}, {"flags": {"--train-fp8": True}}).keys() == {"--train-fp8"}


def test_two_error_modes_for_one_option() -> None:
    rollout = {
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        "env": {"FLASHINFER_NVFP4_4OVER6_ERR_MODE": "MAE"},
    }
    trainer = {"flags": {"--fp4-format": "e2m1"}, "env": {"NVTE_NVFP4_4OVER6_ERR_MODE": "MSE"}}
    told = found(rollout, trainer)
    assert told.keys() == {"NVTE_NVFP4_4OVER6_ERR_MODE"}
    assert "MAE" in told["NVTE_NVFP4_4OVER6_ERR_MODE"]
    trainer["env"] = {"NVTE_NVFP4_4OVER6_ERR_MODE": "MAE"}
    assert found(rollout, trainer) == {}
    del trainer["env"]  # on one side alone it is a difference as well
    assert found(rollout, trainer).keys() == {"NVTE_NVFP4_4OVER6_ERR_MODE"}


def test_blocks_of_64_here_and_a_hard_coded_128_there() -> None:
    told = found(fp8(64, 64), BLOCKWISE)
    assert told.keys() == {"weight.rows", "weight.columns"}
    assert found(fp8(128, 128), BLOCKWISE) == {}


def test_scales_that_are_powers_of_two_on_one_side() -> None:
    blackwell = {**BLOCKWISE, "env": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}}
    assert found(fp8(128, 128), blackwell).keys() == {"weight.rule"}
    assert found(fp8(128, 128, scale_fmt="ue8m0"), blackwell) == {}


@pytest.mark.parametrize("listed", [["model.layers.0", "model.layers.7"], [r"re:model\.layers\.(0|7)\..*"]])
def test_outer_layers_wide_in_the_trainer_and_quantised_in_the_engine(listed: list[str]) -> None:
    flags = {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise", "--first-last-layers-bf16": True}
    told = found(fp8(128, 128, modules_to_not_convert=["lm_head"]), {"flags": {**flags, "--num-layers": 8}})
    assert told.keys() == {"--first-last-layers-bf16"}
    assert "[0, 7]" in told["--first-last-layers-bf16"]
    kept = fp8(128, 128, modules_to_not_convert=["lm_head", *listed])
    assert found(kept, {"flags": {**flags, "--num-layers": 8}}) == {}
    assert found(kept, {"flags": {**flags, "--num-layers": 9}}).keys() == {"--first-last-layers-bf16"}
    assert found(kept, {"flags": flags}).keys() == {"--num-layers"}


def test_a_bf16_trainer_under_a_quantised_rollout_is_a_choice() -> None:
    assert found(fp8(128, 128), {"flags": {"--bf16": True}}) == {}


@pytest.mark.parametrize("name", ["unified_fp8", "mxfp8", "nvfp4_selective"])
def test_what_one_contract_compiles_to_agrees_with_itself(name: str) -> None:
    contract = RECIPES[name]
    plan = resolve(contract, moe(1))
    engine, trainer = sglang_flags(contract, plan), megatron_flags(contract, plan)
    rollout = {"quantization_config": engine.quantization_config, "env": engine.env}
    flags = dict(zip(trainer.flags[:-1:2], trainer.flags[1::2], strict=False))
    side = {"flags": flags, "env": trainer.env}
    assert lift_rollout(rollout).weight == contract.families[0].weight
    assert lift_trainer(side).weight is not None
    assert found(rollout, side) == {}


@pytest.mark.parametrize(
    ("lift", "settings", "key"),
    [
        (lift_rollout, {"quantization_config": {"quant_method": "awq"}}, "quant_method"),
        (lift_trainer, {"flags": {"--fp8-format": "e4m3"}}, "--fp8-recipe"),
        (lift_trainer, {"flags": {"--fp4-format": "e2m1", "--fp4-recipe": "custom"}}, "--fp4-recipe"),
    ],
)
def test_what_is_not_known_is_said_and_not_guessed(lift: Any, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        lift(settings)

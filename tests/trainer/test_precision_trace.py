"""The trace of a step says what the modules did and held, and follows them when they differ from the contract."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conformance.trainer_engine import MODELS, samples, spec_of

from syncline.contract.precision import Variant
from syncline.contract.precision_trace import ComponentTrace, Use
from syncline.contract.recipes import RECIPES
from syncline.reference.trained import NotMultiplied
from syncline.trainer.engines.torch import TorchEngine

EMULATED = "emulated codes, fp32 partial sums"
LOW_BIT_TENSORS = 2 * (4 + 4 * 3)  # tiny-moe: two layers of q, k, v, o and four experts of three
LOW_BIT = 2 * (64 * (64 + 32 + 32 + 64) + 4 * 3 * 64 * 64)  # their elements


def engine_of(tmp: Path, precision: dict[str, Any], model: str = "tiny-moe", **parts: Any) -> TorchEngine:
    engine = TorchEngine(spec_of(model, precision=precision, **parts), MODELS, tmp / "scratch")
    engine.wake()
    return engine


def traced(tmp: Path, precision: dict[str, Any], **parts: Any) -> dict[str, ComponentTrace]:
    result = engine_of(tmp, precision, **parts).step(samples(), 1)
    assert [part.component for part in result.trace] == ["fprop", "dgrad", "wgrad", "optimizer"]
    assert (
        msgspec.json.decode(msgspec.json.encode(result.trace), type=tuple[ComponentTrace, ...])
        == result.trace
    )
    return {part.component: part for part in result.trace}


def use_of(part: ComponentTrace, family: str = "linear") -> Use:
    (use,) = [use for use in part.uses if use.family == family]
    return use


# ---- without families -----------------------------------------------------------------------------------------
def test_a_bf16_step_is_wide_throughout(tmp_path: Path) -> None:
    trace = traced(tmp_path, {"recipe": "bf16"}, optimizer={"name": "adamw"})
    engine = engine_of(tmp_path, {"recipe": "bf16"})
    total = engine.describe().parameters
    for name in ("fprop", "dgrad", "wgrad"):
        (use,) = trace[name].uses
        assert (use.family, use.kernel, use.persistent) == ("", "wide fp32", "bf16 values in fp32")
    assert use_of(trace["fprop"], "").communicated == "bf16"
    assert trace["fprop"].bytes == {"wide": 4 * total}
    assert trace["wgrad"].bytes == {"gradients": 4 * total}
    assert trace["optimizer"].bytes == {"master": 4 * total, "moments": 8 * total, "gathered": 2 * total}
    (use,) = trace["optimizer"].uses
    assert (use.kernel, use.persistent, use.encoded) == ("AdamW", "fp32", "master fp32, moments fp32")


def test_fp32_parameters_show_as_they_are(tmp_path: Path) -> None:
    trace = traced(tmp_path, {"recipe": "fp32"})
    assert (
        use_of(trace["fprop"], "").persistent == "bf16 values in fp32 + fp32 values in fp32"
    )  # ones of the norms
    assert use_of(trace["fprop"], "").communicated == "fp32"
    assert "moments" not in trace["optimizer"].bytes  # plain SGD has none


# ---- variants of FP8 ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variant", "fprop", "dgrad", "wgrad"),
    [
        ("plain", "X original, W original", "G_Y original, W original", "G_Y original, X original"),
        (
            "forward_qdq",
            "X reconstructed 1x128, W reconstructed 128x128",
            "G_Y original, W original",
            "G_Y original, X original",
        ),
        (
            "qdq",
            "X reconstructed 1x128, W reconstructed 128x128",
            "G_Y requantised 1x128, W requantised 128x128",
            "G_Y requantised 1x128, X requantised 1x128",
        ),
        (
            "real",
            "X codes 1x128, W codes 128x128",
            "G_Y codes 1x128, W codes 128x128",
            "G_Y codes 1x128, X codes 1x128",
        ),
    ],
)
def test_each_variant_reads_as_it_multiplies(
    tmp_path: Path, variant: Variant, fprop: str, dgrad: str, wgrad: str
) -> None:
    trace = traced(tmp_path, {"recipe": "unified_fp8", "variant": variant})
    uses = {name: use_of(trace[name]) for name in ("fprop", "dgrad", "wgrad")}
    assert {name: use.operands for name, use in uses.items()} == {
        "fprop": fprop,
        "dgrad": dgrad,
        "wgrad": wgrad,
    }
    assert {use.kernel for use in uses.values()} == {EMULATED if variant == "real" else "wide fp32"}
    assert {use.tensors for use in uses.values()} == {LOW_BIT_TENSORS}
    stored = "bf16 values in fp32" if variant == "plain" else "E4M3, FP32 scale per 128x128"
    assert uses["fprop"].encoded == stored
    assert uses["wgrad"].encoded == (
        "E4M3, FP32 scale per 1x128" if variant in ("qdq", "real") else "X as it came"
    )


def test_bytes_are_those_of_the_copies_that_exist(tmp_path: Path) -> None:
    made: dict[Variant, dict[str, ComponentTrace]] = {}
    variants: tuple[Variant, ...] = ("plain", "forward_qdq", "qdq", "real")
    for variant in variants:
        made[variant] = traced(tmp_path / variant, {"recipe": "unified_fp8", "variant": variant})
    scales = 4 * LOW_BIT_TENSORS  # every tensor of the tiny model is within one block
    assert "codes" not in made["plain"]["fprop"].bytes
    for variant in variants[1:]:
        assert (made[variant]["fprop"].bytes["codes"], made[variant]["fprop"].bytes["scales"]) == (
            LOW_BIT,
            scales,
        )
    assert made["forward_qdq"]["fprop"].bytes["reconstructed"] == 4 * LOW_BIT
    assert "reconstructed" not in made["real"]["fprop"].bytes  # the dequantised weight never exists
    assert "transposed" not in made["forward_qdq"]["dgrad"].bytes
    assert made["real"]["dgrad"].bytes == {
        "transposed": LOW_BIT + scales,
        "workspace": made["real"]["dgrad"].bytes["workspace"],
    }
    assert made["qdq"]["dgrad"].bytes["reconstructed"] == 4 * LOW_BIT
    saved = {variant: trace["wgrad"].bytes["saved_activations"] for variant, trace in made.items()}
    assert saved["plain"] == saved["forward_qdq"]
    assert saved["qdq"] == saved["real"] < saved["plain"]
    assert made["real"]["wgrad"].bytes["workspace"] > 0


# ---- other formats --------------------------------------------------------------------------------------------
def test_weight_only_formats_leave_activations_alone(tmp_path: Path) -> None:
    trace = traced(tmp_path, {"recipe": "int4_qat_w4a16"})
    assert use_of(trace["fprop"]).operands == "X original, W reconstructed 1x32"
    assert use_of(trace["fprop"]).encoded == "INT4, FP32 scale per 1x32"
    assert use_of(trace["dgrad"]).operands == "G_Y original, W reconstructed 1x32"
    assert use_of(trace["wgrad"]).operands == "G_Y original, X original"
    assert trace["fprop"].bytes["codes"] == LOW_BIT // 2
    assert trace["fprop"].bytes["scales"] == 4 * LOW_BIT // 32


def test_a_selective_family_shows_beside_what_stays_wide(tmp_path: Path) -> None:
    trace = traced(tmp_path, {"recipe": "nvfp4_selective"})
    use = use_of(trace["fprop"], "experts")
    assert (use.tensors, use.encoded) == (24, "E2M1, E4M3 scale per 1x16, FP32 outer scale per tensor")
    assert use_of(trace["wgrad"], "experts").operands == "G_Y original, X reconstructed 1x16"
    assert use_of(trace["wgrad"], "experts").encoded == "E2M1, E4M3 scale per 1x16, FP32 outer scale per row"
    assert use_of(trace["fprop"], "").persistent == "bf16 values in fp32"


# ---- gather ---------------------------------------------------------------------------------------------------
def test_gathered_bytes_are_independent_of_the_gemms(tmp_path: Path) -> None:
    recipe: dict[str, Any] = msgspec.to_builtins(RECIPES["unified_fp8"])
    custom = {**recipe, "name": "g", "trainer": {**recipe["trainer"], "gather": "fp8_block"}}
    wide = traced(tmp_path / "a", {"recipe": "unified_fp8", "variant": "real"})["optimizer"]
    codes = traced(tmp_path / "b", {"custom": custom, "variant": "plain"})
    scales = 4 * LOW_BIT_TENSORS
    assert wide.bytes["gathered"] - codes["optimizer"].bytes["gathered"] == LOW_BIT - scales
    assert use_of(codes["fprop"]).communicated == "E4M3 and FP32 scales"
    assert use_of(codes["fprop"]).operands == "X original, W original"


# ---- the trace follows the modules ----------------------------------------------------------------------------
def test_a_module_that_is_not_swapped_is_no_secret(tmp_path: Path) -> None:
    """Someone puts a module's own forward back: the step says so and makes no update of it."""
    engine = engine_of(tmp_path, {"recipe": "unified_fp8"})
    assert engine._live is not None
    del engine._live.loaded.model.get_submodule("model.layers.1.self_attn.o_proj").forward
    with pytest.raises(NotMultiplied, match=r"model\.layers\.1\.self_attn\.o_proj\.weight"):
        engine.step(samples(), 1)


def test_persistent_values_are_looked_at(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, {"recipe": "unified_fp8"})
    assert engine._live is not None
    with torch.no_grad():
        engine._live.loaded.model.get_parameter("model.layers.0.self_attn.q_proj.weight").mul_(1.0 + 2.0**-12)
    fprop = engine.step(samples(), 1).trace[0]
    by_values = {use.persistent: use.tensors for use in fprop.uses if use.family}
    assert by_values == {"bf16 values in fp32": LOW_BIT_TENSORS - 1, "fp32 values in fp32": 1}


def test_a_trace_is_of_its_own_step(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, {"recipe": "unified_fp8"})
    first, second = engine.step(samples(), 1).trace, engine.step(samples(2), 2).trace
    assert second[2].bytes["saved_activations"] < first[2].bytes["saved_activations"]
    assert second[0].uses == first[0].uses
    assert math.isfinite(sum(second[0].bytes.values()))

"""Bytes of every format against the oracle files: an independent reference and the public libraries.

An exception names the case, whose bytes differ, and why. One that no longer differs fails too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import FOLDER, cases, same, tensor

from syncline.contract.schemes import SCHEMES, Rule, Scheme
from syncline.numerics import fp8_block, int4, layouts, mxfp, nvfp4
from syncline.numerics.elements import from_e8m0
from syncline.numerics.quantized import NotQuantizable, dequantize, quantize

HALVES = "torchao stores scale byte 0 but divides by 2^-126: half the value"
FLUSHES = "torchao's RCEIL does not scale a block whose byte is 0"
BYTE_ONE = "transformers never goes below byte 1"
ZERO_ONE = "transformers gives a zero block the scale 1"
WRAPS = "compressed-tensors wraps for amax >= 2.977e38 and loses the data"
LOG2 = "log2 in fp32 misses one ulp above 448 x 2^10"
SIGN = "compressed-tensors drops the sign of -0"
DIVIDES = "compressed-tensors divides by scale / global where the rule multiplies by the inverse"
NO_CLAMP = "compressed-tensors has no lower clamp of the block scale; zero gives 0.125"
FLOORED = "below amax_floor: the outer scale stays a normal number and the block is zero"
NAN_ZERO = "scale 0 and NaN codes for a zero block"
EPS = "compressed-tensors gives a zero block the scale 2^-23"
SUBNORMAL_INVERSE = "the scale is flushed to 0 there; ours keeps the largest finite inverse"
LOOSE = "the reference keeps amax / 448 as the scale; transformers, and ours, 1 / fp32(448 / amax)"
INPUT_DTYPE = "the scale is computed in the input's bf16"
RECIPROCAL = "torchao multiplies by the reciprocal of the scale, so midpoints differ"
ASYMMETRIC = "SYMMETRIC_NO_CLIPPING_ERR is max(min / -8, max / 7): another rule where the extremes differ"
ZERO_EPS = "a zero group has the library's smallest scale, ours 1"

MX = {
    "torchao.floor": "floor",
    "torchao.ceil": "ceil",
    "torchao.rceil": "rceil",
    "torchao.even": "even",
    "compressed_tensors": "even1",
    "compressed_tensors(fp32 weight)": "even1",
    "transformers.Fp8Quantize(ue8m0,(1,32))": "rceil",
    "reference floor": "floor",
    "reference ceil": "ceil",
    "reference rceil": "rceil",
    "reference even": "even",
    "reference ct": "even1",
}
HF = "transformers.Fp8Quantize(ue8m0,(1,32))"
TINY = ("f32_subnormal", "bf16_subnormal", "scale_underflow_2^-119")
MX_EXCEPTIONS: dict[tuple[str, str, str], str] = {
    **{("mxfp8", c, f"torchao.{r}"): HALVES for c in TINY for r in ("floor", "ceil", "even")},
    **{("mxfp8", c, "torchao.rceil"): FLUSHES for c in TINY},
    **{("mxfp8", c, HF): BYTE_ONE for c in TINY},
    **{("mxfp8", c, HF): ZERO_ONE for c in ("zeros", "zero_then_max_2x64")},
    ("mxfp8", "amax_448_plus_1ulp_x2^10_f32", "torchao.rceil"): LOG2,
    ("mxfp8", "amax_448_plus_1ulp_x2^10_f32", HF): LOG2,
    **{
        ("mxfp4", "bf16_subnormal", f"torchao.{r}"): "torchao: scale byte 0 divides by 2^-126"
        for r in ("floor", "ceil", "rceil", "even")
    },
    **{
        (f, "max_bf16", lib): WRAPS
        for f in ("mxfp8", "mxfp4")
        for lib in ("compressed_tensors", "compressed_tensors(fp32 weight)")
    },
    **{
        ("mxfp4", "neg_zero_mixed", lib): SIGN
        for lib in ("compressed_tensors", "compressed_tensors(fp32 weight)")
    },
}


def outputs(case: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Outputs that have bytes: libraries under their names, the reference's rules as "reference RULE"."""
    for name, output in case["outputs"].items():
        if "scale" in output:
            yield name, output
    reference = case.get("reference_numpy", {})
    for name, output in {"": reference}.items() if "scale" in reference else reference.items():
        yield f"reference {name}".strip(), output


def finite(case: dict[str, Any]) -> torch.Tensor | None:
    x = tensor(case["input"]).float()
    return x if bool(torch.isfinite(x).all()) else None


def params(*files: str) -> list[Any]:
    return [pytest.param(file, case, id=f"{file}-{case['name']}") for file in files for case in cases(file)]


def verdict(agrees: bool, reason: str | None) -> None:
    if reason is None:
        assert agrees
    else:
        assert not agrees, f"no exception any more: {reason}"


@pytest.mark.parametrize(("file", "case"), params("mxfp8", "mxfp4"))
def test_mx(file: Any, case: dict[str, Any]) -> None:
    x = finite(case)
    if x is None or x.shape[-1] % 32:
        return  # refused: `test_what_is_refused`
    compared = 0
    for source, output in outputs(case):
        if source not in MX:
            continue
        scheme = Scheme(format=file, rows=1, columns=32, rule=MX[source])  # type: ignore[arg-type]
        codes, scale = mxfp.encode(x, scheme)
        agrees = same(scale, output["scale"]) and same(codes, output["data"])
        verdict(agrees, MX_EXCEPTIONS.get((file, case["name"], source)))
        if agrees and source.startswith("reference"):
            assert same(mxfp.decode(codes, scale, scheme), output["deq"])
        compared += 1
    assert compared >= 9


NVFP4_SOURCES = ("torchao.two_level", "torchao.per_expert", "compressed_tensors(fp32 weight)", "reference")
CT = "compressed_tensors(fp32 weight)"
NVFP4_EXCEPTIONS: dict[tuple[str, str], str] = {
    **{
        (c, s): FLOORED
        for c in ("zeros", "f32_subnormal", "bf16_subnormal", "scale_underflow_2^-119")
        for s in ("torchao.two_level", "reference", CT)
    },
    ("neg_zero_mixed", CT): SIGN,
    **{
        (c, CT): DIVIDES
        for c in (
            "e2m1_ties",
            "amax_4.5",
            "amax_5.0",
            "amax_5.5",
            "amax_6.0",
            "amax_384",
            "amax_496",
        )
    },
    **{
        (c, CT): NO_CLAMP
        for c in (
            "max_bf16",
            "amax_448_plus_1ulp_x2^10_f32",
            "zero_then_max_2x64",
            "two_rows_different_range",
        )
    },
}


@pytest.mark.parametrize(("file", "case"), params("nvfp4"))
def test_nvfp4(file: str, case: dict[str, Any]) -> None:
    x = finite(case)
    if x is None or x.shape[-1] % 16:
        return
    scheme = SCHEMES["nvfp4"]
    amax = x.abs().amax() if x.dim() == 2 else x.abs().amax((1, 2), keepdim=True)
    outer = nvfp4.outer_scale(amax, scheme)
    codes, scale = nvfp4.encode(x, outer)
    compared = 0
    for source, output in outputs(case):
        if source not in NVFP4_SOURCES:
            continue
        agrees = same(scale, output["scale"]) and same(codes, output["data"])
        if source != CT:  # which stores 2688 / amax
            agrees = agrees and same(outer, output["outer"])
        verdict(agrees, NVFP4_EXCEPTIONS.get((case["name"], source)))
        if agrees and source != CT:
            assert same(nvfp4.decode(codes, scale, outer), output["deq"])
        compared += 1
    assert compared >= 1


FP8_RULES: dict[str, tuple[Rule, float]] = {
    "fp32": ("amax/448", 0.0),
    "blockwise": ("448/amax in fp64", 1e-12),
    "float)": ("448/amax", 0.0),
    "ue8m0": ("pow2", 0.0),
    "reference amax/448": ("amax/448", 0.0),
    "reference hf": ("448/amax", 0.0),
    "reference ao_blk": ("448/amax in fp64", 1e-12),
    "reference pow2": ("pow2", 0.0),
}
FP8_EXCEPTIONS: dict[tuple[str, str], str] = {
    **{(c, "PerBlock"): NAN_ZERO for c in ("second_block_zero", "zero_block_then_448", "three_rows")},
    **{(c, "compressed_tensors"): EPS for c in ("second_block_zero", "zero_block_then_448", "three_rows")},
    **{
        (c, s): SUBNORMAL_INVERSE
        for c in ("subnormal", "max_and_min_subnormal")
        for s in ("reference hf", "float)")
    },
    **{(c, "ue8m0"): BYTE_ONE for c in ("subnormal", "max_and_min_subnormal")},
    **{(c, "reference hf"): LOOSE for c in ("ascending_1e-6", "eps_1e-13_1e-12", "three_rows")},
}


@pytest.mark.parametrize(("file", "case"), params("fp8_block_weight", "fp8_block_act"))
def test_fp8_block(file: str, case: dict[str, Any]) -> None:
    x = finite(case)
    if x is None:
        return
    compared = 0
    for source, output in outputs(case):
        if "bf16" in source:
            continue  # INPUT_DTYPE
        rule, floor = next(rule for mark, rule in FP8_RULES.items() if mark in source)
        rows = 128 if file == "fp8_block_weight" else 1
        scheme = Scheme(
            format="fp8_block", rows=rows, columns=128, rule=rule, amax_floor=floor, padding="partial"
        )
        codes, scale = fp8_block.encode(x, scheme)
        agrees = same(codes, output["data"]) and _same_scale(scale, output["scale"])
        reasons = [r for (c, s), r in FP8_EXCEPTIONS.items() if c == case["name"] and s in source]
        verdict(agrees, reasons[0] if reasons else None)
        if agrees and source.startswith("reference"):
            assert same(fp8_block.decode(codes, scale, scheme), output["deq"])
        compared += 1
    assert compared >= 4


def _same_scale(scale: torch.Tensor, entry: dict[str, Any]) -> bool:
    """Scales as float32; transformers' ue8m0 ones are stored as exponent bytes."""
    if entry["dtype"] == "uint8":
        return bool(torch.equal(from_e8m0(tensor(entry)).flatten(), scale.flatten()))
    return same(scale, entry)


INT4_RULES: dict[str, Rule] = {
    "seed amax/7": "amax/7",
    "custom": "amax/7",
    "NO_CLIPPING": "amax/7",
    "reference amax/7 ": "amax/7",
    "reference amax/7.5": "amax/7.5",
    "W4A16": "amax/7.5",
    "SYMMETRIC": "amax/7.5",
}
INT4_EXCEPTIONS: dict[tuple[str, str], str] = {
    **{
        (c, "NO_CLIPPING"): ASYMMETRIC
        for c in ("ramp_g32", "neg_amax_g32", "neg_amax_g128", "subnormal_g32", "subnormal_g128")
    },
    **{(f"zeros_g{g}", s): ZERO_EPS for g in (32, 128) for s in ("SYMMETRIC", "W4A16(fp32)")},
    ("ramp_g32", "SYMMETRIC(fp32)"): RECIPROCAL,
    **{(f"subnormal_g{g}", "SYMMETRIC(fp32)"): "torchao floors the scale at fp32's eps" for g in (32, 128)},
}


@pytest.mark.parametrize(("file", "case"), params("int4"))
def test_int4(file: str, case: dict[str, Any]) -> None:
    x = finite(case)
    if x is None:
        return
    compared = 0
    for source, output in outputs(case):
        if "bf16" in source:
            continue  # INPUT_DTYPE
        rule = next(rule for mark, rule in INT4_RULES.items() if mark in source)
        scheme = Scheme(format="int4", rows=1, columns=case["group"], rule=rule)
        codes, scale = int4.encode(x, scheme)
        agrees = same(scale, output["scale"]) and same(codes, output["codes"])
        packed = output.get("data", output.get("packed"))
        if packed is not None:
            agrees = agrees and same(int4.pack(codes), packed)
        reasons = [r for (c, s), r in INT4_EXCEPTIONS.items() if c == case["name"] and s in source]
        verdict(agrees, reasons[0] if reasons else None)
        if agrees and source.startswith(("reference", "seed")):
            assert same(int4.decode(codes, scale, scheme), output["deq"])
        compared += 1
    assert compared >= (0 if "nonmultiple" in case["name"] else 4)


@pytest.mark.parametrize(
    ("file", "case"), params("mxfp8", "mxfp4", "nvfp4", "fp8_block_weight", "fp8_block_act", "int4")
)
def test_what_is_refused(file: str, case: dict[str, Any]) -> None:
    """Infinities and NaN by name and index, sizes by the legal ones; all else goes through the one door."""
    x = tensor(case["input"]).float()
    scheme = SCHEMES[
        {"fp8_block_weight": "fp8_block", "fp8_block_act": "fp8_tile", "int4": "int4_g32"}.get(file, file)
    ]
    step = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "int4": 32}.get(file, 1)
    bad = (~torch.isfinite(x)).flatten().nonzero()
    if len(bad):
        with pytest.raises(NotQuantizable, match=f"tensor layer.w is .* at flat index {int(bad[0])} "):
            quantize(x, scheme, "tensor layer.w")
    elif x.shape[-1] % step:
        legal = x.shape[-1] // step * step
        with pytest.raises(
            NotQuantizable, match=f"layer.w has K = {x.shape[-1]}.*legal (are {legal} and|is {step})"
        ):
            quantize(x, scheme, "layer.w")
    elif case["name"] == "max_bf16" and file in ("mxfp8", "mxfp4"):
        with pytest.raises(NotQuantizable, match="dequantises to inf"):
            quantize(x, scheme, "layer.w")
    else:
        assert dequantize(quantize(x, scheme, "layer.w")).shape == x.shape


def test_layouts() -> None:
    import json

    data = json.loads((FOLDER / "layouts.json").read_text())
    scale = tensor(data["swizzle"]["input"])
    assert same(layouts.swizzle(scale), data["swizzle"]["output"])
    assert torch.equal(layouts.unswizzle(layouts.swizzle(scale), *scale.shape), scale)
    oss = data["gpt_oss_mxfp4"]
    blocks, scales = tensor(oss["blocks"]), tensor(oss["scales"])
    values = mxfp.decode(layouts.from_gpt_oss_blocks(blocks), scales, SCHEMES["mxfp4"])
    assert same(values.transpose(1, 2).to(torch.bfloat16), oss["output_bf16"])
    assert torch.equal(layouts.gpt_oss_blocks(layouts.from_gpt_oss_blocks(blocks)), blocks)

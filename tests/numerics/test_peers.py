"""Bytes against the public libraries themselves, where the extra `bench-peers` is installed; oracle files elsewhere.

Equal wherever the rule is ours; each test of a difference names the rule that differs and finds it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from test_properties import made

from syncline.contract.schemes import SCHEMES, Rule, Scheme
from syncline.numerics.quantized import Quantized, dequantize, quantize

pytest.importorskip("torchao", reason="the extra `bench-peers` is not installed")
pytest.importorskip("compressed_tensors", reason="the extra `bench-peers` is not installed")

from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    MXFP4PackedCompressor,
    MXFP8QuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import IntxUnpackedToInt8Tensor, PerBlock
from torchao.quantization.quantize_.workflows import Float8Tensor

pytestmark = pytest.mark.filterwarnings("ignore")
SPREADS = (0.0, 3.0)
SEEDS = range(4)


def weights(spread: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [made(seed, [256, 512], spread, dtype) for seed in SEEDS]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8).flatten()


def same(ours: Quantized, codes: torch.Tensor, scale: torch.Tensor) -> bool:
    return torch.equal(raw(ours.codes), raw(codes)) and torch.equal(raw(ours.scale), raw(scale))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil", "even"])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_mx_is_torchao(format: Any, rule: Rule, dtype: torch.dtype, spread: float) -> None:
    """There and back, in every rule, from FP32 and from BF16."""
    element = torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2
    scheme = Scheme(format=format, rows=1, columns=32, rule=rule)
    for x in weights(spread, dtype):
        ours = quantize(x, scheme, "w")
        scale, codes = to_mx(x, element, 32, ScaleCalculationMode[rule.upper()])
        assert same(ours, codes, scale)
        back = to_dtype(codes, scale, element, 32, torch.bfloat16)
        assert torch.equal(dequantize(ours, torch.bfloat16), back)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("preset", "compressor", "scheme"),
    [
        ("FP8_BLOCK", FloatQuantizationCompressor, SCHEMES["fp8_block"]),
        ("MXFP8A16", MXFP8QuantizationCompressor, replace(SCHEMES["mxfp8"], rule="even1")),
        ("MXFP4A16", MXFP4PackedCompressor, SCHEMES["mxfp4"]),
        ("W4A16", PackedQuantizationCompressor, replace(SCHEMES["int4_g128"], rule="amax/7.5")),
    ],
)
def test_a_weight_is_compressed_tensors(preset: str, compressor: Any, scheme: Scheme, spread: float) -> None:
    """From FP32; `test_scales_from_bf16_input_differ` says why. -0 apart, whose sign they drop."""
    for x in weights(spread):
        x = torch.where(x == 0, 0.0, x)
        ours, theirs = quantize(x, scheme, "w"), compressed(x, preset, compressor, scheme)
        codes = theirs.get("weight_packed", theirs.get("weight"))
        assert same(ours, codes, theirs["weight_scale"])


def compressed(x: torch.Tensor, preset: str, compressor: Any, scheme: Scheme) -> Any:
    plan = preset_name_to_scheme(preset, ["Linear"])
    blocks = x.view(x.shape[0] // scheme.rows, scheme.rows, x.shape[1] // scheme.columns, scheme.columns)
    scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), plan.weights)
    return compressor.compress({"weight": x, "weight_scale": scale}, plan)


@pytest.mark.parametrize("spread", SPREADS)
def test_nvfp4_is_torchao(spread: float) -> None:
    """From FP32 and BF16; the outer scale of the whole tensor."""
    for dtype in (torch.float32, torch.bfloat16):
        for x in weights(spread, dtype):
            ours = quantize(x, SCHEMES["nvfp4"], "w")
            outer = per_tensor_amax_to_scale(x.abs().max())
            theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer)
            assert ours.outer is not None
            assert torch.equal(ours.outer, outer)
            assert same(ours, theirs.qdata, theirs.scale)
            assert torch.equal(dequantize(ours, torch.bfloat16), theirs.dequantize(torch.bfloat16))


def test_nvfp4_of_compressed_tensors_divides_and_does_not_clamp() -> None:
    """Rules: outer 2688 / amax as a quotient, x / (scale / outer), no lower clamp of the block scale."""
    plan = preset_name_to_scheme("NVFP4A16", ["Linear"])
    differ, total = 0, 0
    for x in weights(0.0):
        blocks = x.view(x.shape[0], -1, 16)
        outer = generate_gparam(blocks.amin(), blocks.amax())
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), plan.weights, outer)
        state = {"weight": x, "weight_scale": scale, "weight_global_scale": outer}
        theirs = NVFP4PackedCompressor.compress(state, plan)
        ours = quantize(x, SCHEMES["nvfp4"], "w")
        differ += int((raw(ours.codes) != raw(theirs["weight_packed"])).sum())
        total += ours.codes.numel()
    assert differ / total < 1e-3, "midpoints alone"


def test_fp8_is_torchao_from_fp32() -> None:
    for x in weights(3.0):
        for name, rows in (("fp8_block", 128), ("fp8_tile", 1)):
            ours = quantize(x, SCHEMES[name], "w")
            theirs = Float8Tensor.from_hp(x, torch.float8_e4m3fn, granularity=PerBlock([rows, 128]))
            assert same(ours, theirs.qdata, theirs.scale)
            assert torch.equal(dequantize(ours), theirs.dequantize().float())


def test_scales_from_bf16_input_differ() -> None:
    """Rule: both libraries compute FP8 scales in the input's dtype. Ours are the same from BF16 as from FP32."""
    for x in weights(0.0, torch.bfloat16):
        ours = quantize(x, SCHEMES["fp8_block"], "w")
        theirs = Float8Tensor.from_hp(x, torch.float8_e4m3fn, granularity=PerBlock([128, 128]))
        off = (theirs.scale.float() / ours.scale - 1).abs()
        assert 0 < float(off.max()) < 4e-3
        assert same(quantize(x.float(), SCHEMES["fp8_block"], "w"), ours.codes, ours.scale)


def test_int4_of_torchao_multiplies_by_the_reciprocal() -> None:
    """Rule: x * (1 / scale), so midpoints differ; scales are equal."""
    differ, total = 0, 0
    for x in weights(0.0):
        ours = quantize(x, replace(SCHEMES["int4_g32"], rule="amax/7.5"), "w")
        theirs = IntxUnpackedToInt8Tensor.from_hp(x, (1, 32), vars(torch)["int4"])
        assert torch.equal(ours.scale, theirs.scale)
        differ += int((dequantize(ours) != theirs.dequantize()).sum())
        total += x.numel()
    assert 0 < differ / total < 1e-2

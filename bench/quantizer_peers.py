"""Other people's quantizers, each as two functions: what `quantizers.py` measures ours against.

Needs the extra `bench-peers`. A call does what the library does for a weight in memory, scales included; what it does
once for a model (presets, modules) stays outside. Dequantising ends in BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import torch

E4M3 = torch.float8_e4m3fn


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to quantise with a library.

    name        library, version and function
    quantize    of the input in `dtype`
    codes       of what `quantize` gives, where they must be ours: same rule, scales in FP32; None: elsewhere
    dequantize  of what `quantize` gives, to BF16
    dtype       of the input that it gets
    """

    name: str
    quantize: Callable[[torch.Tensor], Any]
    codes: Callable[[Any], torch.Tensor] | None
    dequantize: Callable[[Any], torch.Tensor]
    dtype: torch.dtype


def installed(library: str) -> str:
    """Its version, or ""."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def peers(scheme: str) -> list[Peer]:
    """All ways of the installed libraries for one of `quantizers.CASES`."""
    found: list[Peer] = []
    for library, ways in (("torchao", torchao), ("compressed-tensors", compressed_tensors)):
        if installed(library):
            for way in ways(scheme):
                for dtype in (torch.float32, torch.bfloat16):
                    found.append(
                        Peer(
                            name=f"{library} {installed(library)} {way.name}, {said(dtype)} in",
                            quantize=way.quantize,
                            codes=way.codes if dtype == torch.float32 else None,
                            dequantize=way.dequantize,
                            dtype=dtype,
                        )
                    )
    return found


def said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Way(msgspec.Struct, frozen=True):
    """A `Peer` before its input's dtype is chosen."""

    name: str
    quantize: Callable[[torch.Tensor], Any]
    codes: Callable[[Any], torch.Tensor] | None
    dequantize: Callable[[Any], torch.Tensor]


# ---- torchao --------------------------------------------------------------------------------------------------
def torchao(scheme: str) -> Iterator[Way]:
    match scheme:
        case "mxfp8":
            yield torchao_mx(E4M3, "RCEIL")
        case "mxfp4":
            yield torchao_mx(torch.float4_e2m1fn_x2, "EVEN")
        case "nvfp4":
            yield torchao_nvfp4()
        case "fp8_block" | "fp8_tile":
            yield torchao_float8(128 if scheme == "fp8_block" else 1)
            yield from torchao_training(scheme)
        case _:
            yield torchao_int4(int(scheme.removeprefix("int4_g")))


def torchao_mx(element: torch.dtype, mode: str) -> Way:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    def quantize(x: torch.Tensor) -> Any:
        return to_mx(x, element, 32, ScaleCalculationMode[mode])

    def dequantize(made: Any) -> torch.Tensor:
        back: torch.Tensor = to_dtype(made[1], made[0], element, 32, torch.bfloat16)
        return back

    return Way(f"to_mx {mode}", quantize, lambda made: made[1], dequantize)


def torchao_nvfp4() -> Way:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def quantize(x: torch.Tensor) -> Any:
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))

    return Way("to_nvfp4", quantize, lambda made: made.qdata, lambda made: made.dequantize(torch.bfloat16))


def torchao_float8(rows: int) -> Way:
    from torchao.quantization import PerBlock
    from torchao.quantization.quantize_.workflows import Float8Tensor

    def quantize(x: torch.Tensor) -> Any:
        return Float8Tensor.from_hp(x, E4M3, granularity=PerBlock([rows, 128]))

    def dequantize(made: Any) -> torch.Tensor:
        return made.dequantize().to(torch.bfloat16)  # type: ignore[no-any-return]

    return Way("Float8Tensor", quantize, lambda made: made.qdata, dequantize)


def torchao_training(scheme: str) -> Iterator[Way]:
    """The torch functions of its blockwise training, which import Triton and do not use it."""
    if not installed("triton"):
        return
    from torchao.prototype.blockwise_fp8_training import kernels

    rows = 128 if scheme == "fp8_block" else 1
    name = "torch_blockwise_scale_" + ("weight_quant" if rows == 128 else "act_quant_lhs")
    function = vars(kernels)[name]

    def dequantize(made: Any) -> torch.Tensor:
        """The library has none of its own."""
        codes, scale = made
        blocks = codes.float().view(scale.shape[0], rows, scale.shape[1], 128)
        values = (blocks * scale.view(scale.shape[0], 1, scale.shape[1], 1)).view(codes.shape)
        return values.to(torch.bfloat16)  # type: ignore[no-any-return]

    yield Way(name, function, None, dequantize)  # its rule is "448/amax in fp64"


def torchao_int4(group: int) -> Way:
    from torchao.quantization import IntxUnpackedToInt8Tensor

    def quantize(x: torch.Tensor) -> Any:
        return IntxUnpackedToInt8Tensor.from_hp(x, (1, group), vars(torch)["int4"])  # not in torch's stubs

    def dequantize(made: Any) -> torch.Tensor:
        return made.dequantize().to(torch.bfloat16)  # type: ignore[no-any-return]

    return Way("IntxUnpackedToInt8Tensor, unpacked", quantize, None, dequantize)


# ---- compressed-tensors ---------------------------------------------------------------------------------------
PRESETS = {"mxfp8": "MXFP8A16", "mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16", "fp8_block": "FP8_BLOCK"}


def compressed_tensors(scheme: str) -> Iterator[Way]:
    from compressed_tensors import compressors
    from compressed_tensors.quantization import preset_name_to_scheme

    if scheme == "fp8_tile":
        yield compressed_tile(preset_name_to_scheme("FP8_BLOCK", ["Linear"]).input_activations)
        return
    preset = preset_name_to_scheme(PRESETS.get(scheme, "W4A16"), ["Linear"])
    if scheme.startswith("int4_g"):
        preset.weights.group_size = int(scheme.removeprefix("int4_g"))
    kind = {
        "mxfp8": "MXFP8QuantizationCompressor",
        "mxfp4": "MXFP4PackedCompressor",
        "nvfp4": "NVFP4PackedCompressor",
        "fp8_block": "FloatQuantizationCompressor",
    }.get(scheme, "PackedQuantizationCompressor")
    compressor = vars(compressors)[kind]
    packed = "weight" if scheme in ("mxfp8", "fp8_block") else "weight_packed"
    for scales in (torch.float32, torch.bfloat16):
        yield compressed_weight(compressor, preset, packed, scales)


def compressed_weight(compressor: Any, preset: Any, packed: str, scales: torch.dtype) -> Way:
    """Scales kept in `scales` before they are stored: the library decodes in their dtype."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = preset.weights
    block = tuple(args.block_structure) if args.block_structure else (1, args.group_size)

    def quantize(x: torch.Tensor) -> Any:
        blocks = x.view(x.shape[0] // block[0], block[0], x.shape[1] // block[1], block[1])
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        state = {"weight": x}
        if packed == "weight_packed" and args.type == "float" and args.group_size == 16:
            state["weight_global_scale"] = generate_gparam(low.amin(), high.amax())
        scale, _ = calculate_qparams(low, high, args, state.get("weight_global_scale"))
        return compressor.compress(state | {"weight_scale": scale.to(scales)}, preset)

    def dequantize(made: Any) -> torch.Tensor:
        return compressor.decompress(made, preset)["weight"].to(torch.bfloat16)  # type: ignore[no-any-return]

    def codes(made: Any) -> torch.Tensor:
        return made[packed]  # type: ignore[no-any-return]

    # its MXFP8 rule is "even1"
    exact = scales == torch.float32 and compressor.__name__ != "MXFP8QuantizationCompressor"
    return Way(
        f"{compressor.__name__}, {said(scales)} scales", quantize, codes if exact else None, dequantize
    )


def compressed_tile(args: Any) -> Way:
    """Activations: what its linear layers call before each GEMM."""
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    def quantize(x: torch.Tensor) -> Any:
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
        return forward.quantize(x, scale, zero, args, dtype=E4M3), scale

    def dequantize(made: Any) -> torch.Tensor:
        values: torch.Tensor = forward.dequantize(*made, args=args, dtype=torch.bfloat16)
        return values

    return Way("lifecycle.forward.quantize", quantize, lambda made: made[0], dequantize)

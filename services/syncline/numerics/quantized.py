"""The one door to the formats: `quantize`, `dequantize`, and what a quantised tensor is.

Everything that quantises (trainer QDQ, converter, verifier, engine) comes through here, so that equal values give
equal bytes everywhere. Work is done in float32 whatever the input's dtype: scales computed in BF16 differ by up to
3e-3 (compressed-tensors and torchao do so for BF16 inputs).
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

import torch
import torch.nn.functional as F

from syncline.contract.schemes import BLOCK, Scheme, problem
from syncline.numerics import blockwise, fp8_block, int4, mxfp, nvfp4


class NotQuantizable(ValueError):
    """A tensor or scheme that cannot be quantised. The message names the tensor, and the index or the key."""


class Quantized(NamedTuple):
    """A tensor in few bits.

    codes   float8_e4m3fn (fp8_block, mxfp8), uint8 with two values a byte (mxfp4, nvfp4), int32 with eight (int4)
    scale   float32 (fp8_block, int4), uint8 E8M0 (mxfp8, mxfp4), float8_e4m3fn (nvfp4)
    outer   float32 outer scale of nvfp4, else None
    shape   of the tensor before padding
    """

    scheme: Scheme
    codes: torch.Tensor
    scale: torch.Tensor
    outer: torch.Tensor | None
    shape: tuple[int, ...]

    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        parts = (self.codes, self.scale, self.outer)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def quantize(
    x: torch.Tensor, scheme: Scheme, name: str = "tensor", outer: torch.Tensor | None = None
) -> Quantized:
    """Quantise `x` (float32, bfloat16 or float16; at least one dimension, K last) by `scheme`.

    outer   for nvfp4: the outer scale to use (of a fused group, or per expert); None: from this tensor's amax, or
            from each row's, as the scheme says

    Raises `NotQuantizable` for a contradictory scheme, a size that the block does not divide under padding
    "refuse", and a value that is not finite or whose dequantised value would not be (naming `name` and flat index).
    """
    wrong = problem(scheme)
    if wrong:
        raise NotQuantizable(f"scheme of {name}: {wrong}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.dim() == 0 or x.numel() == 0:
        raise NotQuantizable(
            f"{name} is {x.dtype} of shape {list(x.shape)}: floats, at least one, are needed"
        )
    if outer is not None and scheme.format != "nvfp4":
        raise NotQuantizable(f"{name}: an outer scale has no meaning for {scheme.format}")
    whole = _padded(x.detach(), scheme, name)
    amax = _block_amax(whole, scheme)
    most = float(amax.amax())
    if not isfinite(most):
        _refuse_non_finite(x.detach().float(), name)
    quantized = _encode(whole, amax, scheme, outer, tuple(x.shape))
    if most >= 2.0**127:  # a rounded up code times its scale may overflow
        _refuse_non_finite(dequantize(quantized), name, "dequantises to ")
    return quantized


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values, in the original shape, rounded once to `dtype`."""
    scheme, codes, scale = quantized.scheme, quantized.codes, quantized.scale
    k = quantized.shape[-1]
    match scheme.format:
        case "fp8_block":
            values = fp8_block.decode(codes, scale, scheme, dtype)
        case "int4":
            return int4.decode_packed(codes, scale, scheme, k, dtype)
        case "mxfp8" | "mxfp4":
            values = mxfp.decode(codes, scale, scheme, dtype)
        case "nvfp4":
            if quantized.outer is None:
                raise NotQuantizable("an nvfp4 tensor without its outer scale")
            values = nvfp4.decode(codes, scale, quantized.outer, dtype)
    return values[..., :k]


def outer_scale(tensors: list[torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """The outer scale that fused nvfp4 tensors share: of the largest magnitude in any of them."""
    amax = [tensor.detach().float().abs().amax() for tensor in tensors if tensor.numel()]
    return nvfp4.outer_scale(torch.stack(amax).amax() if amax else torch.zeros(()), scheme)


def _block_amax(whole: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """float32 largest magnitude of each block."""
    if scheme.format == "fp8_block":
        return fp8_block.block_amax(whole, scheme)
    return blockwise.block_amax(whole, 1, scheme.columns)


def _encode(
    whole: torch.Tensor,
    amax: torch.Tensor,
    scheme: Scheme,
    outer: torch.Tensor | None,
    shape: tuple[int, ...],
) -> Quantized:
    match scheme.format:
        case "fp8_block":
            codes, scale = fp8_block.encode_under(whole, amax, scheme)
        case "int4":
            codes, scale = int4.encode_under(whole, amax, scheme)
        case "mxfp8" | "mxfp4":
            codes, scale = mxfp.encode_under(whole, amax, scheme)
        case "nvfp4":
            if outer is None:
                most = amax.amax(-1, keepdim=True) if scheme.outer == "row" else amax.amax()
                outer = nvfp4.outer_scale(most, scheme)
            codes, scale = nvfp4.encode_under(whole, amax, outer)
    return Quantized(scheme, codes, scale, outer, shape)


def _padded(x: torch.Tensor, scheme: Scheme, name: str) -> torch.Tensor:
    """`x` with K as the scheme wants it. Raises `NotQuantizable` naming the sizes that would do."""
    k = x.shape[-1]
    step = BLOCK[scheme.format] or scheme.columns
    n = x.shape[-2] if x.dim() > 1 else 1
    if scheme.padding == "refuse" and n % scheme.rows:
        raise NotQuantizable(f"{name} has {n} rows, no multiple of {scheme.rows}; {_near(n, scheme.rows)}")
    if k % step == 0 or scheme.padding == "partial":
        return x
    if scheme.padding == "refuse":
        raise NotQuantizable(f"{name} has K = {k}, no multiple of {step}; {_near(k, step)}")
    return F.pad(x, (0, -k % step))


def _near(size: int, step: int) -> str:
    low, high = size // step * step, -(-size // step) * step
    return f"legal is {high}" if low == 0 else f"legal are {low} and {high}"


def _refuse_non_finite(wide: torch.Tensor, name: str, what: str = "is ") -> None:
    """Raise `NotQuantizable` at the first value that is not finite."""
    finite = torch.isfinite(wide)
    if not bool(finite.all()):
        index = int((~finite).flatten().to(torch.uint8).argmax())
        value = wide.flatten()[index].item()
        raise NotQuantizable(f"{name} {what}{value} at flat index {index} of shape {list(wide.shape)}")

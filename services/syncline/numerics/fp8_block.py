"""Blockwise FP8: E4M3 codes with one float32 scale per `rows` x `columns` block (DeepSeek-V3's 128x128 and 1x128).

Legend: `x` float32 or bfloat16 [.., N, K] or [K]; codes float8_e4m3fn of x's shape; scale float32 [.., ceil(N/rows),
ceil(K/columns)]. The last blocks may be partial. A block whose scale would be 0 has scale 1 and zero codes.
Value = code * scale, one rounding.
"""

from __future__ import annotations

import torch

from syncline.contract.schemes import Scheme
from syncline.numerics import blockwise
from syncline.numerics.elements import E4M3_MAX, power_of_two


def encode(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `x` (at least one dimension)."""
    return encode_under(x, block_amax(x, scheme), scheme)


def encode_under(x: torch.Tensor, amax: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `x`, whose blocks have the largest magnitudes `amax`."""
    scale, factor, multiply = _scales(amax, scheme)
    codes = blockwise.encode_e4m3(_matrix(x), factor, scheme.rows, scheme.columns, divide=not multiply)
    return codes.view(x.shape), scale


def decode(
    codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values of the codes' shape."""
    values = blockwise.decode_e4m3(_matrix(codes), scale, scheme.rows, scheme.columns, dtype)
    return values.view(codes.shape)


def block_amax(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Largest magnitude of each block, [.., ceil(N/rows), ceil(K/columns)]."""
    return blockwise.block_amax(_matrix(x), scheme.rows, scheme.columns)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() > 1 else x.unsqueeze(0)


def _scales(amax: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(scale to store, factor of the values, whether to multiply by it or divide)."""
    floored = amax.clamp(min=scheme.amax_floor) if scheme.amax_floor else amax
    match scheme.rule:
        case "amax/448":
            scale = _one_if_zero(floored / E4M3_MAX)
            return scale, scale, False
        case "pow2":
            # the smallest power of two with amax / scale <= 448 = 1.75 x 2^8 = 0.875 x 2^9
            mantissa, exponent = torch.frexp(floored)
            power = exponent - 9 + (mantissa > 0.875).to(torch.int32)
            scale = _one_if_zero(power_of_two(power).where(floored > 0, 0.0))
            return scale, scale, False
        case "448/amax":
            inverse = (E4M3_MAX / floored).clamp(max=torch.finfo(torch.float32).max).where(floored > 0, 1.0)
            return 1.0 / inverse, inverse, True
        case "448/amax in fp64":
            inverse = (E4M3_MAX / floored.double()).float()
            return 1.0 / inverse, inverse, True
        case _:
            raise ValueError(f"rule {scheme.rule!r} is none of fp8_block")


def _one_if_zero(scale: torch.Tensor) -> torch.Tensor:
    return scale.where(scale > 0, 1.0)

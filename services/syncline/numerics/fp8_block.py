"""Blockwise FP8: E4M3 codes with one float32 scale per `rows` x `columns` block (DeepSeek-V3's 128x128 and 1x128).

Legend: `x` float32 [.., N, K] or [K]; codes float8_e4m3fn of x's shape; scale float32 [.., ceil(N/rows),
ceil(K/columns)]. The last blocks may be partial. A block whose scale would be 0 has scale 1 and zero codes.
Value = code * scale, one rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from syncline.contract.schemes import Scheme
from syncline.numerics.elements import E4M3_MAX, to_e4m3


def encode(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `x` (at least one dimension)."""
    matrix = x if x.dim() > 1 else x.unsqueeze(0)
    amax = block_amax(matrix, scheme)
    scale, factor, multiply = _scales(amax, scheme)
    wide = _spread(factor, matrix.shape, scheme)
    codes = to_e4m3(matrix * wide if multiply else matrix / wide)
    return codes.view(x.shape), scale


def decode(codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """float32 values of the codes' shape."""
    matrix = codes if codes.dim() > 1 else codes.unsqueeze(0)
    return (matrix.float() * _spread(scale, matrix.shape, scheme)).view(codes.shape)


def block_amax(matrix: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Largest magnitude of each block, [.., ceil(N/rows), ceil(K/columns)]."""
    n, k = matrix.shape[-2:]
    whole = F.pad(matrix.abs(), (0, -k % scheme.columns, 0, -n % scheme.rows))
    rows, columns = whole.shape[-2] // scheme.rows, whole.shape[-1] // scheme.columns
    blocks = whole.reshape(*whole.shape[:-2], rows, scheme.rows, columns, scheme.columns)
    return blocks.amax((-3, -1))


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
            scale = _one_if_zero(torch.ldexp(torch.ones_like(floored), power).where(floored > 0, 0.0))
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


def _spread(scale: torch.Tensor, shape: torch.Size, scheme: Scheme) -> torch.Tensor:
    """One scale per value: [.., N, K]."""
    rows = scale.repeat_interleave(scheme.rows, -2)[..., : shape[-2], :]
    return rows.repeat_interleave(scheme.columns, -1)[..., : shape[-1]]

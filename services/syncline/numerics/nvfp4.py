"""NVFP4: blocks of 16 along K with an E4M3 scale, under one float32 outer scale per tensor (per expert, per row).

Legend: `x` float32 or bfloat16 [.., K], K a multiple of 16; codes uint8 [.., K/2], low nibble first; scale
float8_e4m3fn [.., K/16]; outer float32, [] for a tensor, [E, 1, 1] for experts that have one each, [.., 1] for rows.
Value = code * (scale * outer).

Fused projections (gate and up; q, k and v) share one outer scale: take `outer_scale` of their common amax. The
block scale is at least 2^-6, so that a small block beside a large one loses values and not its scale.
"""

from __future__ import annotations

import torch

from syncline.contract.schemes import Scheme
from syncline.numerics.blockwise import block_amax, decode_e2m1, encode_e2m1
from syncline.numerics.elements import E2M1_MAX, E4M3_MAX, to_e4m3

BLOCK = 16
SMALLEST = 2.0**-6  # smallest normal E4M3 number


def outer_scale(amax: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """float32 outer scale for the tensor maximum (or per-expert maxima) `amax`, floored by the scheme."""
    return amax.float().clamp(min=scheme.amax_floor) / (E4M3_MAX * E2M1_MAX)


def encode(x: torch.Tensor, outer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of `x` under `outer` (broadcastable to x's leading dimensions, with K as 1)."""
    return encode_under(x, block_amax(x, 1, BLOCK), outer)


def encode_under(
    x: torch.Tensor, amax: torch.Tensor, outer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of `x`, whose blocks have the largest magnitudes `amax`, under `outer`."""
    scale = to_e4m3((amax / E2M1_MAX / outer).clamp(SMALLEST, E4M3_MAX))
    factor = (1.0 / outer) / scale.float()
    return encode_e2m1(x, factor, BLOCK), scale


def decode(
    codes: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values [.., K]."""
    return decode_e2m1(codes, scale.float() * outer, BLOCK, dtype)

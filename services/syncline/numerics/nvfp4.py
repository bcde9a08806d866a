"""NVFP4: blocks of 16 along K with an E4M3 scale, under one float32 outer scale per tensor (or per expert).

Legend: `x` float32 [.., K], K a multiple of 16; codes uint8 [.., K/2], low nibble first; scale float8_e4m3fn
[.., K/16]; outer float32, [] for a tensor, [E, 1, 1] for experts that have one each. Value = code * (scale * outer).

Fused projections (gate and up; q, k and v) share one outer scale: take `outer_scale` of their common amax. The
block scale is at least 2^-6, so that a small block beside a large one loses values and not its scale.
"""

from __future__ import annotations

import torch

from syncline.contract.schemes import Scheme
from syncline.numerics.elements import (
    E2M1_MAX,
    E4M3_MAX,
    blocked,
    from_e2m1,
    pack_nibbles,
    to_e2m1,
    to_e4m3,
    unpack_nibbles,
)

BLOCK = 16
SMALLEST = 2.0**-6  # smallest normal E4M3 number


def outer_scale(amax: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """float32 outer scale for the tensor maximum (or per-expert maxima) `amax`, floored by the scheme."""
    return amax.float().clamp(min=scheme.amax_floor) / (E4M3_MAX * E2M1_MAX)


def encode(x: torch.Tensor, outer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of `x` under `outer` (broadcastable to x's leading dimensions, with K as 1)."""
    blocks = blocked(x, BLOCK)
    wide = outer.unsqueeze(-1) if outer.dim() else outer
    want = blocks.abs().amax(-1, keepdim=True) / E2M1_MAX / wide
    scale = to_e4m3(want.clamp(SMALLEST, E4M3_MAX))
    inverse = (1.0 / wide) / scale.float()
    return pack_nibbles(to_e2m1((blocks * inverse).flatten(-2))), scale.squeeze(-1)


def decode(codes: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """float32 values [.., K]."""
    values = blocked(from_e2m1(unpack_nibbles(codes)), BLOCK)
    return (values * (scale.float() * outer).unsqueeze(-1)).flatten(-2)

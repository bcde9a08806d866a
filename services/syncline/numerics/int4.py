"""INT4, grouped and symmetric (W4A16): codes times one float32 scale per group along K.

Legend: `x` float32 [.., K]; codes int8 -8..7; packed int32 [.., ceil(K/8)], nibble = code + 8, element 0 in bits
0-3 (the `pack-quantized` layout of compressed-tensors); scale float32 [.., ceil(K/columns)].
Rule "amax/7": codes -7..7, the largest value is kept exactly. Rule "amax/7.5": codes -8..7, a positive largest value
loses 1/15 of itself. A zero group has the scale that `amax_floor` says, or 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from syncline.contract.schemes import Scheme
from syncline.numerics.elements import blocked

PER_WORD = 8


def encode(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8, x's shape) and scales of `x`."""
    k = x.shape[-1]
    groups = blocked(F.pad(x, (0, -k % scheme.columns)), scheme.columns)
    amax = groups.abs().amax(-1)
    amax = amax.clamp(min=scheme.amax_floor) if scheme.amax_floor else amax
    match scheme.rule:
        case "amax/7":
            divisor, low = 7.0, -7
        case "amax/7.5":
            divisor, low = 7.5, -8
        case _:
            raise ValueError(f"rule {scheme.rule!r} is none of int4")
    scale = amax / divisor
    scale = scale.where(scale > 0, 1.0)
    codes = (groups / scale.unsqueeze(-1)).round().clamp(low, 7).to(torch.int8)
    return codes.flatten(-2)[..., :k], scale


def decode(codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """float32 values of the codes' shape."""
    wide = scale.repeat_interleave(scheme.columns, -1)[..., : codes.shape[-1]]
    return codes.float() * wide


def pack(codes: torch.Tensor) -> torch.Tensor:
    """int32 words of `codes`; the nibbles beyond K in the last word are 0."""
    k = codes.shape[-1]
    nibbles = blocked(F.pad((codes.to(torch.int32) + 8), (0, -k % PER_WORD)), PER_WORD)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (nibbles << shifts).sum(-1, dtype=torch.int64).to(torch.int32)


def unpack(words: torch.Tensor, k: int) -> torch.Tensor:
    """Inverse of `pack`: int8 codes [.., k]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    nibbles = (words.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles.flatten(-2)[..., :k] - 8).to(torch.int8)

"""INT4, grouped and symmetric (W4A16): codes times one float32 scale per group along K.

Legend: `x` float32 or bfloat16 [.., K]; codes int8 -8..7; packed int32 [.., ceil(K/8)], nibble = code + 8, element 0
in bits 0-3 (the `pack-quantized` layout of compressed-tensors); scale float32 [.., ceil(K/columns)].
Rule "amax/7": codes -7..7, the largest value is kept exactly. Rule "amax/7.5": codes -8..7, a positive largest value
loses 1/15 of itself. A zero group has the scale that `amax_floor` says, or 1.
"""

from __future__ import annotations

import torch

from syncline.contract.schemes import Scheme
from syncline.numerics.blockwise import block_amax, decode_int4, encode_int4
from syncline.numerics.elements import pack_words, unpack_words


def encode(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8, x's shape) and scales of `x`."""
    words, scale = encode_under(x, block_amax(x, 1, scheme.columns), scheme)
    return unpack(words, x.shape[-1]), scale


def encode_under(x: torch.Tensor, amax: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scales of `x`, whose groups have the largest magnitudes `amax`."""
    match scheme.rule:
        case "amax/7":
            divisor, least = 7.0, -7
        case "amax/7.5":
            divisor, least = 7.5, -8
        case _:
            raise ValueError(f"rule {scheme.rule!r} is none of int4")
    scale = (amax.clamp(min=scheme.amax_floor) if scheme.amax_floor else amax) / divisor
    scale = scale.where(scale > 0, 1.0)
    return encode_int4(x, scale, scheme.columns, least), scale


def decode(codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """float32 values of the codes' shape."""
    return codes.float() * scale.repeat_interleave(scheme.columns, -1)[..., : codes.shape[-1]]


def decode_packed(
    words: torch.Tensor, scale: torch.Tensor, scheme: Scheme, k: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values [.., k] of packed codes."""
    return decode_int4(words, scale, scheme.columns, k, dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """int32 words of `codes`; the nibbles beyond K in the last word are 0."""
    return pack_words(codes)


def unpack(words: torch.Tensor, k: int) -> torch.Tensor:
    """Inverse of `pack`: int8 codes [.., k]."""
    return unpack_words(words, k)

"""MXFP8 and MXFP4: blocks of 32 along K with one E8M0 scale (OCP MX 1.0).

Legend: `x` float32 or bfloat16 [.., K], K a multiple of 32; scale uint8 [.., K/32]; MXFP8 codes float8_e4m3fn [.., K];
MXFP4 codes uint8 [.., K/2], low nibble first. A zero block has scale byte 0 and codes that keep the sign of zero.
All products with powers of two are exact, so dequantised values are exact in float32 and in BF16.
"""

from __future__ import annotations

import torch

from syncline.contract.schemes import Scheme
from syncline.numerics.blockwise import block_amax, decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3
from syncline.numerics.elements import from_e8m0, inverse_e8m0

BLOCK = 32
_EMAX = {"mxfp8": 8, "mxfp4": 2}  # exponent of the largest element value
_TOP = {"mxfp8": 0x600000, "mxfp4": 0x400000}  # its mantissa bits: 448 = 1.75 x 2^8, 6 = 1.5 x 2^2
_MANTISSA = {"mxfp8": 3, "mxfp4": 1}


def scale_bytes(amax: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """E8M0 bytes for block maxima `amax` (float32, finite, >= 0), by `scheme.rule`; exact for every input."""
    amax = amax.clamp(min=scheme.amax_floor) if scheme.amax_floor else amax
    # 1.fraction x 2^power has the bits power + 127 | fraction (23 bits): the exponent takes one more where an addition
    # to the fraction carries over. A subnormal amax is under every scale but the smallest, byte 0, for any fraction.
    match scheme.rule:
        case "floor":
            carry = 0
        case "ceil":
            carry = 0x7FFFFF
        case "rceil":
            carry = 0x7FFFFF - _TOP[scheme.format]
        case "even" | "even1":
            carry = 1 << (22 - (_MANTISSA[scheme.format] if scheme.rule == "even" else 1))
        case _:
            raise ValueError(f"rule {scheme.rule!r} is none of {scheme.format}")
    power = (amax.view(torch.int32) + carry).bitwise_right_shift_(23)
    return power.sub_(_EMAX[scheme.format]).clamp_(0, 254).to(torch.uint8)


def encode(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes of `x`."""
    return encode_under(x, block_amax(x, 1, BLOCK), scheme)


def encode_under(x: torch.Tensor, amax: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes of `x`, whose blocks have the largest magnitudes `amax`."""
    scale = scale_bytes(amax, scheme)
    factor = inverse_e8m0(scale)
    if scheme.format == "mxfp8":
        return encode_e4m3(x, factor, 1, BLOCK), scale
    return encode_e2m1(x, factor, BLOCK), scale


def decode(
    codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values [.., K]."""
    wide = from_e8m0(scale)
    if scheme.format == "mxfp8":
        return decode_e4m3(codes, wide, 1, BLOCK, dtype)
    return decode_e2m1(codes, wide, BLOCK, dtype)

"""MXFP8 and MXFP4: blocks of 32 along K with one E8M0 scale (OCP MX 1.0).

Legend: `x` float32 [.., K], K a multiple of 32; scale uint8 [.., K/32]; MXFP8 codes float8_e4m3fn [.., K];
MXFP4 codes uint8 [.., K/2], low nibble first. A zero block has scale byte 0 and codes that keep the sign of zero.
All products with powers of two are exact, so dequantised values are exact in float32 and in BF16.
"""

from __future__ import annotations

import torch

from syncline.contract.schemes import Scheme
from syncline.numerics.elements import (
    blocked,
    from_e2m1,
    from_e8m0,
    inverse_e8m0,
    pack_nibbles,
    to_e2m1,
    to_e4m3,
    unpack_nibbles,
)

BLOCK = 32
_EMAX = {"mxfp8": 8, "mxfp4": 2}  # exponent of the largest element value
_TOP = {"mxfp8": 0x600000, "mxfp4": 0x400000}  # its mantissa bits: 448 = 1.75 x 2^8, 6 = 1.5 x 2^2
_MANTISSA = {"mxfp8": 3, "mxfp4": 1}


def scale_bytes(amax: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """E8M0 bytes for block maxima `amax` (float32, finite, >= 0), by `scheme.rule`; exact for every input."""
    amax = amax.clamp(min=scheme.amax_floor) if scheme.amax_floor else amax
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa x 2^exponent with 0.5 <= mantissa < 1
    # the same as 1.fraction x 2^power, with the fraction as 23 bits, subnormals included
    fraction = (mantissa.view(torch.int32) & 0x7FFFFF).where(amax > 0, 0)
    power = exponent - 1
    match scheme.rule:
        case "floor":
            up = torch.zeros_like(fraction, dtype=torch.bool)
        case "ceil":
            up = fraction > 0
        case "rceil":
            up = fraction > _TOP[scheme.format]
        case "even" | "even1":
            bits = _MANTISSA[scheme.format] if scheme.rule == "even" else 1
            up = fraction + (1 << (22 - bits)) >= 1 << 23
        case _:
            raise ValueError(f"rule {scheme.rule!r} is none of {scheme.format}")
    byte = power - _EMAX[scheme.format] + up.to(torch.int32) + 127
    return byte.clamp(0, 254).where(amax > 0, 0).to(torch.uint8)


def encode(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes of `x`."""
    blocks = blocked(x, BLOCK)
    scale = scale_bytes(blocks.abs().amax(-1), scheme)
    scaled = (blocks * inverse_e8m0(scale).unsqueeze(-1)).flatten(-2)
    codes = to_e4m3(scaled) if scheme.format == "mxfp8" else pack_nibbles(to_e2m1(scaled))
    return codes, scale


def decode(codes: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """float32 values [.., K]."""
    values = codes.float() if scheme.format == "mxfp8" else from_e2m1(unpack_nibbles(codes))
    return (blocked(values, BLOCK) * from_e8m0(scale).unsqueeze(-1)).flatten(-2)

"""Element formats: values to codes and back, exactly. E4M3 and E2M1 round to nearest even and saturate.

Shapes: any; `x` is float32. Inputs are finite: `quantized.quantize` has refused others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNED = (*E2M1_VALUES, *(-value for value in E2M1_VALUES))


def blocked(x: torch.Tensor, size: int) -> torch.Tensor:
    """[.., K] -> [.., K/size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn codes of float32 `x`; beyond +-448 saturates (torch does so on CPU and not on every device)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes (sign << 3 | E2M1) of float32 `x`; the sign of a zero is kept.

    From 1 on, E2M1 is a float with one mantissa bit: the upper bits of `x`, rounded half to even. Below 1 its
    values are multiples of 0.5.
    """
    bits = x.view(torch.int32)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - 252  # 1.0 is 254 in that unit and code 2
    small = (size.view(torch.float32) * 2).round().to(torch.int32)
    code = torch.where(size < 0x3F800000, small, normal.clamp(max=7))
    return (code | ((bits >> 28) & 8)).to(torch.uint8)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 `codes` 0..15."""
    table = torch.tensor(_SIGNED, dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int64)]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[.., K] uint8 codes 0..15 -> [.., K/2] bytes, element 2j in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def from_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """float32 powers of two of E8M0 bytes 0..254: 2^(byte - 127); byte 0 is the subnormal 2^-127, exactly."""
    bits = scale.to(torch.int32) << 23
    return bits.clamp_(min=0x00400000).view(torch.float32)  # only byte 0 has fewer bits


def power_of_two(power: torch.Tensor) -> torch.Tensor:
    """float32 2^power of int32 `power` up to 127, exactly, subnormals included; 0 below 2^-149.

    Made of bits: torch's `ldexp` goes through `pow`, which is exact on CPU and promised on no other device.
    """
    normal = (power.clamp(min=-126) + 127) << 23
    subnormal = torch.ones_like(power) << (power + 149).clamp(0, 22)
    bits = torch.where(power >= -126, normal, subnormal.where(power >= -149, 0))
    return bits.view(torch.float32)


def inverse_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """float32 reciprocals of `from_e8m0`, exact: 2^(127 - byte)."""
    return from_e8m0(254 - scale)


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """[.., K] int8 codes -8..7 -> [.., ceil(K/8)] int32: nibble = code + 8, element 0 in bits 0-3, 0 beyond K."""
    nibbles = blocked(F.pad(codes.to(torch.int32) + 8, (0, -codes.shape[-1] % 8)), 8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (nibbles << shifts).sum(-1, dtype=torch.int64).to(torch.int32)


def unpack_words(words: torch.Tensor, k: int) -> torch.Tensor:
    """Inverse of `pack_words`: int8 codes [.., k]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    nibbles = (words.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles.flatten(-2)[..., :k] - 8).to(torch.int8)

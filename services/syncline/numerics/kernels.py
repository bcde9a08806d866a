"""Machine code for CPU tensors: block maxima, block codes and their inverses, each in one pass over memory.

Only element formats are said again here (E4M3, E2M1, INT4, the rounding to BF16), bit for bit as `elements.py` and
`int4.py` say them; which scales the blocks have is decided in the format files alone. `blockwise.py` is the only
caller, and `tests/numerics/test_kernels.py` holds both ways equal.

Legend: all arrays are flat and little-endian. `x` and the decoded `out` are bits: uint16 (BF16, `shift` 16) or uint32
(FP32, `shift` 0). A tensor is a stack of matrices of `n` x `k`. A block has `rows` x `columns` values, the last one of
a row or column fewer; `scale` has one value per block. `low` .. `high` are bands of `rows` rows, counted through the
stack: calls on different bands write different memory, so they may run at once.

Numba compiles a function when it is first called with new types (half a second each) and keeps the result on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numba import njit
from numpy import float32, int32, uint8, uint16, uint32, uint64

Array = np.ndarray[Any, np.dtype[Any]]
P = ParamSpec("P")
R = TypeVar("R")


def _part(function: Callable[P, R]) -> Callable[P, R]:
    """A function that only machine code calls."""
    made: Callable[P, R] = njit(error_model="numpy")(function)
    return made


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Machine code that runs without the interpreter's lock. Each operation is IEEE's: nothing is reassociated."""
    made: Callable[P, R]
    try:
        made = njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no folder for the cache can be written to
        made = njit(nogil=True, error_model="numpy")(function)
    return made


# ---- elements -------------------------------------------------------------------------------------------------
@_part
def _bits(value: float32) -> Any:
    return float32(value).view(uint32)


@_part
def _value(bits: uint32) -> Any:
    return uint32(bits).view(float32)


@_part
def _wide(raw: Any, shift: uint32) -> Any:
    return uint32(uint32(raw) << shift).view(float32)


@_part
def _narrow(value: float32, shift: uint32) -> Any:
    """Upper bits of `value`, rounded half to even; all of them with `shift` 0. A NaN stays one."""
    bits = _bits(value)
    if shift == uint32(0):
        return bits
    rounded = uint32(
        uint32(bits + uint32(0x7FFF) + uint32(uint32(bits >> uint32(16)) & uint32(1))) >> uint32(16)
    )
    return uint32(0x7FC0) if uint32(bits & uint32(0x7FFFFFFF)) > uint32(0x7F800000) else rounded


@_part
def _rounded(size: uint32, drop: uint32) -> Any:
    """`size` without its lowest `drop` bits, rounded half to even."""
    half = uint32(uint32(uint32(1) << uint32(drop - uint32(1))) - uint32(1))
    return uint32(uint32(size + half + uint32(uint32(size >> drop) & uint32(1))) >> drop)


@_part
def _to_e4m3(value: float32) -> Any:
    bits = _bits(value)
    size = uint32(bits & uint32(0x7FFFFFFF))
    normal = min(uint32(_rounded(size, uint32(20)) - uint32(960)), uint32(0x7E))  # 2^-6 is code 8
    # below 2^-6 codes are multiples of 2^-9, which is the last bit of a number from 2^14 on
    small = uint32(_bits(float32(_value(size) + float32(16384.0))) - uint32(0x46800000))
    code = small if size < uint32(0x3C800000) else uint32(normal)
    code = uint32(0x7F) if size > uint32(0x7F800000) else code
    return uint8(uint32(code) | uint32(uint32(bits >> uint32(24)) & uint32(0x80)))


@_part
def _from_e4m3(code: uint8) -> Any:
    size = uint32(code & uint8(0x7F))
    normal = uint32(uint32(size << uint32(20)) + uint32(120 << 23))
    small = _bits(float32(float32(int32(size)) * float32(2.0**-9)))
    bits = small if size < uint32(8) else normal
    bits = uint32(0x7FC00000) if size == uint32(0x7F) else bits
    return _value(uint32(bits | uint32(uint32(code & uint8(0x80)) << uint32(24))))


@_part
def _to_e2m1(value: float32) -> Any:
    bits = _bits(value)
    size = uint32(bits & uint32(0x7FFFFFFF))
    normal = min(uint32(_rounded(size, uint32(22)) - uint32(252)), uint32(7))  # 1.0 is code 2
    # below 1 codes are multiples of 0.5, which is the last bit of a number from 2^22 on
    small = uint32(_bits(float32(_value(size) + float32(4194304.0))) - uint32(0x4A800000))
    code = small if size < uint32(0x3F800000) else uint32(normal)
    return uint8(uint32(code) | uint32(uint32(bits >> uint32(28)) & uint32(8)))


@_part
def _from_e2m1(code: uint8) -> Any:
    size = uint32(code & uint8(7))
    normal = uint32(uint32(size << uint32(22)) + uint32(126 << 23))
    small = _bits(float32(float32(int32(size)) * float32(0.5)))
    bits = small if size < uint32(2) else normal
    return _value(uint32(bits | uint32(uint32(code & uint8(8)) << uint32(28))))


# ---- blocks ---------------------------------------------------------------------------------------------------
@compiled
def amax(
    x: Array, out: Array, n: int, k: int, rows: int, columns: int, sign: Any, low: int, high: int
) -> None:
    """Bits of each block's largest magnitude; a NaN is larger than infinity. `sign`: mask of all bits but the sign."""
    bands, wide = -(-n // rows), -(-k // columns)
    for band in range(low, high):
        first = band // bands * n + band % bands * rows
        last = min(first + rows, (band // bands + 1) * n)
        best = out[band * wide : (band + 1) * wide]
        best[:] = 0
        for row in range(first, last):
            for b in range(wide):
                block = x[row * k + b * columns : row * k + min((b + 1) * columns, k)]
                most = best[b]
                for j in range(block.size):
                    most = max(most, block[j] & sign)
                best[b] = most


@compiled
def encode_e4m3(
    x: Array,
    scale: Array,
    out: Array,
    n: int,
    k: int,
    rows: int,
    columns: int,
    divide: bool,
    shift: Any,
    low: int,
    high: int,
) -> None:
    """E4M3 codes of x / scale or x * scale."""
    bands, wide = -(-n // rows), -(-k // columns)
    for band in range(low, high):
        first = band // bands * n + band % bands * rows
        last = min(first + rows, (band // bands + 1) * n)
        for row in range(first, last):
            for b in range(wide):
                factor = scale[band * wide + b]
                start, end = row * k + b * columns, row * k + min((b + 1) * columns, k)
                block, codes = x[start:end], out[start:end]
                if divide:
                    for j in range(block.size):
                        codes[j] = _to_e4m3(float32(_wide(block[j], shift) / factor))
                else:
                    for j in range(block.size):
                        codes[j] = _to_e4m3(float32(_wide(block[j], shift) * factor))


@compiled
def decode_e4m3(
    codes: Array,
    scale: Array,
    out: Array,
    n: int,
    k: int,
    rows: int,
    columns: int,
    shift: Any,
    low: int,
    high: int,
) -> None:
    """Code * scale."""
    bands, wide = -(-n // rows), -(-k // columns)
    for band in range(low, high):
        first = band // bands * n + band % bands * rows
        last = min(first + rows, (band // bands + 1) * n)
        for row in range(first, last):
            for b in range(wide):
                factor = scale[band * wide + b]
                start, end = row * k + b * columns, row * k + min((b + 1) * columns, k)
                block, values = codes[start:end], out[start:end]
                for j in range(block.size):
                    values[j] = _narrow(float32(_from_e4m3(block[j]) * factor), shift)


@compiled
def encode_e2m1(
    x: Array, scale: Array, out: Array, k: int, columns: int, shift: Any, low: int, high: int
) -> None:
    """Two E2M1 codes of x * scale per byte. `k` is a multiple of `columns`, which is even; a band is a row."""
    wide, half = k // columns, k // 2
    nibbles = np.empty(k, uint8)
    pairs = nibbles.view(uint16)
    for row in range(low, high):
        for b in range(wide):
            factor = scale[row * wide + b]
            block = x[row * k + b * columns : row * k + (b + 1) * columns]
            codes = nibbles[b * columns : (b + 1) * columns]
            for j in range(block.size):
                codes[j] = _to_e2m1(float32(_wide(block[j], shift) * factor))
        packed = out[row * half : (row + 1) * half]
        for j in range(half):
            packed[j] = uint8(pairs[j] | (pairs[j] >> uint16(4)))


@compiled
def decode_e2m1(
    packed: Array, scale: Array, out: Array, k: int, columns: int, shift: Any, low: int, high: int
) -> None:
    """Inverse of `encode_e2m1`, with the block's own scale: code * scale."""
    wide, half = k // columns, k // 2
    nibbles = np.empty(k, uint8)
    pairs = nibbles.view(uint16)
    for row in range(low, high):
        bytes_ = packed[row * half : (row + 1) * half]
        for j in range(half):
            pairs[j] = (uint16(bytes_[j]) | (uint16(bytes_[j]) << uint16(4))) & uint16(0x0F0F)
        for b in range(wide):
            factor = scale[row * wide + b]
            codes = nibbles[b * columns : (b + 1) * columns]
            values = out[row * k + b * columns : row * k + (b + 1) * columns]
            for j in range(codes.size):
                values[j] = _narrow(float32(_from_e2m1(codes[j]) * factor), shift)


@compiled
def encode_int4(
    x: Array, scale: Array, out: Array, k: int, columns: int, least: Any, shift: Any, low: int, high: int
) -> None:
    """Eight codes of x / scale per uint32, each `least` .. 7 plus 8; what lies beyond `k` is 0."""
    wide, words = -(-k // columns), -(-k // 8)
    nibbles = np.zeros(words * 8, uint8)
    eights = nibbles.view(uint64)
    for row in range(low, high):
        for b in range(wide):
            factor = scale[row * wide + b]
            block = x[row * k + b * columns : row * k + min((b + 1) * columns, k)]
            codes = nibbles[b * columns : b * columns + block.size]
            for j in range(block.size):
                code = np.rint(float32(_wide(block[j], shift) / factor))
                codes[j] = uint8(int32(min(max(code, least), float32(7.0))) + int32(8))
        packed = out[row * words : (row + 1) * words]
        for j in range(words):
            word = eights[j]
            word = (word | (word >> uint64(4))) & uint64(0x00FF00FF00FF00FF)
            word = (word | (word >> uint64(8))) & uint64(0x0000FFFF0000FFFF)
            packed[j] = uint32(word | (word >> uint64(16)))


@compiled
def decode_int4(
    packed: Array,
    scale: Array,
    out: Array,
    k: int,
    columns: int,
    words: int,
    scales: int,
    shift: Any,
    low: int,
    high: int,
) -> None:
    """Inverse of `encode_int4`: (nibble - 8) * scale. A row has `words` words and `scales` scales, or more than `k`
    needs."""
    wide = -(-k // columns)
    nibbles = np.empty(words * 8, uint8)
    eights = nibbles.view(uint64)
    for row in range(low, high):
        for j in range(words):
            word = uint64(packed[row * words + j])
            word = (word | (word << uint64(16))) & uint64(0x0000FFFF0000FFFF)
            word = (word | (word << uint64(8))) & uint64(0x00FF00FF00FF00FF)
            eights[j] = (word | (word << uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)
        for b in range(wide):
            factor = scale[row * scales + b]
            values = out[row * k + b * columns : row * k + min((b + 1) * columns, k)]
            codes = nibbles[b * columns : b * columns + values.size]
            for j in range(values.size):
                values[j] = _narrow(float32(float32(int32(codes[j]) - int32(8)) * factor), shift)

"""The oracle of the formats: codes and scales from their definitions, in numpy, value by value and without hurry.

Sources: OCP Microscaling 1.0 (E4M3, E2M1, E8M0), NVIDIA's NVFP4, DeepSeek-V3's blockwise FP8, compressed-tensors'
`pack-quantized`. Shares nothing with `numerics` but the words of a scheme. Legend: x float32 [N, K].
"""

from __future__ import annotations

from math import ceil, frexp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.contract.schemes import Scheme

Floats = NDArray[np.float32]
_E4M3 = [m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][
    :-1
]  # the last is NaN
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_LARGEST = {"mxfp8": 448.0, "mxfp4": 6.0}
_MANTISSA = {"mxfp8": 3, "mxfp4": 1}


def encoded(x: Floats, scheme: Scheme, amax: float | None = None) -> dict[str, bytes]:
    """Role (`contract/artefact.py`) -> bytes of the checkpoint tensor that `x` becomes.

    amax   nvfp4: the largest magnitude of all tensors that share the outer scale; None: of `x`
    """
    n, k = x.shape
    if scheme.padding == "zero" and scheme.format in ("mxfp8", "mxfp4", "nvfp4", "int4"):
        x = np.pad(x, ((0, 0), (0, -k % scheme.columns)))
    match scheme.format:
        case "fp8_block":
            return _named(*_blocks(x, scheme))
        case "int4":
            return _named(*_groups(x, scheme)) | {"shape": np.array([n, k], np.int64).tobytes()}
        case "mxfp8" | "mxfp4":
            return _named(*_microscaled(x, scheme))
        case "nvfp4":
            return _two_level(x, scheme, amax)


def _named(codes: NDArray[Any], scale: NDArray[Any]) -> dict[str, bytes]:
    return {"codes": codes.tobytes(), "scale": scale.tobytes()}


def _blocks(x: Floats, scheme: Scheme) -> tuple[NDArray[np.uint8], Floats]:
    """One FP32 scale per rows x columns; the last blocks may be smaller."""
    n, k = x.shape
    codes = np.zeros((n, k), np.uint8)
    scale = np.ones((ceil(n / scheme.rows), ceil(k / scheme.columns)), np.float32)
    for i, j in np.ndindex(scale.shape):
        rows = slice(i * scheme.rows, (i + 1) * scheme.rows)
        columns = slice(j * scheme.columns, (j + 1) * scheme.columns)
        block = x[rows, columns]
        most = max(np.float32(np.abs(block).max()), np.float32(scheme.amax_floor))
        found = _power_of_two(most) if scheme.rule == "pow2" else np.float32(most / np.float32(448))
        scale[i, j] = found if found > 0 else 1
        codes[rows, columns] = nearest(block / scale[i, j], _E4M3, 7)
    if scheme.rule not in ("amax/448", "pow2"):
        raise ValueError(f"the oracle has no rule {scheme.rule!r}")
    return codes, scale


def _power_of_two(most: np.float32) -> np.float32:
    """The smallest power of two that `most` fits under 448 times."""
    if most <= 0:
        return np.float32(0)
    exponent = frexp(float(most) / 448.0)[1]
    power = 2.0 ** (exponent - 1)
    return np.float32(power if float(most) <= 448.0 * power else 2 * power)


def _groups(x: Floats, scheme: Scheme) -> tuple[NDArray[np.int32], Floats]:
    """INT4: nibble = code + 8, element 0 lowest, eight in a word; nibbles beyond K are 0."""
    divisor, least = {"amax/7": (7.0, -7), "amax/7.5": (7.5, -8)}[scheme.rule]
    n, k = x.shape
    scale = np.ones((n, ceil(k / scheme.columns)), np.float32)
    codes = np.zeros((n, k), np.int64)
    for group in range(scale.shape[1]):
        columns = slice(group * scheme.columns, (group + 1) * scheme.columns)
        most = np.maximum(np.abs(x[:, columns]).max(1), np.float32(scheme.amax_floor))
        found = (most / np.float32(divisor)).astype(np.float32)
        scale[:, group] = np.where(found > 0, found, 1)
        codes[:, columns] = np.clip(np.rint(x[:, columns] / scale[:, group, None]), least, 7)
    nibbles = np.zeros((n, ceil(k / 8) * 8), np.int64)
    nibbles[:, :k] = codes + 8
    words = (nibbles.reshape(n, -1, 8) << (4 * np.arange(8))).sum(-1).astype(np.uint32)
    return words.view(np.int32), scale


def _microscaled(x: Floats, scheme: Scheme) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    n, k = x.shape
    scale = np.zeros((n, k // 32), np.uint8)
    values = np.zeros((n, k), np.float64)
    for i, j in np.ndindex(scale.shape):
        block = x[i, 32 * j : 32 * (j + 1)].astype(np.float64)
        scale[i, j] = _e8m0(max(float(np.abs(block).max()), scheme.amax_floor), scheme)
        values[i, 32 * j : 32 * (j + 1)] = block / 2.0 ** (int(scale[i, j]) - 127)
    if scheme.format == "mxfp8":
        return nearest(values, _E4M3, 7), scale
    return _pairs(nearest(values, _E2M1, 3)), scale


def _e8m0(amax: float, scheme: Scheme) -> int:
    """Biased exponent of the scale that the rule chooses."""
    if amax == 0:
        return 0
    fraction, exponent = frexp(amax)  # amax = fraction x 2^exponent, fraction in [0.5, 1)
    floor = exponent - 1
    largest = _LARGEST[scheme.format]
    top = frexp(largest)[1] - 1
    match scheme.rule:
        case "floor":
            power = floor - top
        case "ceil":
            power = floor - top + (fraction != 0.5)
        case "rceil":
            power = floor - top + (2 * fraction > largest / 2.0**top)
        case "even" | "even1":
            bits = _MANTISSA[scheme.format] if scheme.rule == "even" else 1
            power = floor - top + (2 * fraction >= 2 - 2.0 ** -(bits + 1))
        case _:
            raise ValueError(f"the oracle has no rule {scheme.rule!r}")
    return min(max(power + 127, 0), 254)


def _two_level(x: Floats, scheme: Scheme, amax: float | None) -> dict[str, bytes]:
    most = np.float32(np.abs(x).max() if amax is None else amax)
    outer = np.float32(max(most, np.float32(scheme.amax_floor)) / np.float32(448 * 6))
    n, k = x.shape
    scale = np.zeros((n, k // 16), np.uint8)
    scaled = np.zeros((n, k), np.float32)
    for j in range(k // 16):
        block = x[:, 16 * j : 16 * (j + 1)]
        wanted = np.abs(block).max(1) / np.float32(6) / outer
        scale[:, j] = nearest(np.clip(wanted, np.float32(2.0**-6), np.float32(448)), _E4M3, 7)
        held = np.array(_E4M3, np.float32)[scale[:, j]]
        scaled[:, 16 * j : 16 * (j + 1)] = block * ((np.float32(1) / outer) / held)[:, None]
    codes = _pairs(nearest(scaled, _E2M1, 3))
    return {"codes": codes.tobytes(), "scale": scale.tobytes(), "outer": outer.tobytes()}


def nearest(x: NDArray[np.floating], values: list[float], sign: int) -> NDArray[np.uint8]:
    """Codes of `x`: the nearest of `values`, of two equally near the even code, the largest beyond it; bit `sign`."""
    table = np.array(values, np.float64)
    size = np.abs(x).astype(np.float64)
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = size - table[above - 1], table[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    codes = np.where(up, above, above - 1)
    signed: NDArray[np.uint8] = (codes | (np.signbit(x).astype(np.int64) << sign)).astype(np.uint8)
    return signed


def _pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two 4-bit codes in a byte, the first in the low nibble."""
    packed: NDArray[np.uint8] = (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    return packed

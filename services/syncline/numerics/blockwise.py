"""The work that formats share: block maxima, codes of scaled values, values of codes.

Each function says it in torch, for any device, and hands CPU tensors to machine code (`compiled.py`) where numba is
installed: the same bytes, many times faster. Nothing here chooses a scale.

Legend: `x` float32, bfloat16 or float16 [.., N, K] (or [K] where `rows` is 1). A block has `rows` x `columns` values,
columns along K; the last ones of a matrix may be partial. `scale` float32 [.., ceil(N/rows), ceil(K/columns)].
Products and quotients are taken in float32; values are rounded once more, to `dtype`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from syncline.numerics.elements import (
    blocked,
    from_e2m1,
    pack_nibbles,
    pack_words,
    to_e2m1,
    to_e4m3,
    unpack_nibbles,
    unpack_words,
)

COMPILED = find_spec("numba") is not None
"""Whether CPU tensors go to machine code. `compiled` is imported on first use: numba alone takes 0.3 s."""


def block_amax(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """float32 largest magnitude of each block, in scale's shape. Infinities come through, and NaN before them."""
    if _compiled(x):
        from syncline.numerics import compiled

        return compiled.block_amax(x, rows, columns)
    size = F.pad(x.float().abs(), (0, -x.shape[-1] % columns))
    if rows > 1:
        size = F.pad(size, (0, 0, 0, -x.shape[-2] % rows))
        size = size.reshape(*size.shape[:-2], -1, rows, size.shape[-1]).amax(-2)
    return blocked(size, columns).amax(-1)


def encode_e4m3(
    x: torch.Tensor, scale: torch.Tensor, rows: int, columns: int, *, divide: bool = False
) -> torch.Tensor:
    """float8_e4m3fn codes, of x's shape, of x * scale, or of x / scale."""
    if _compiled(x):
        from syncline.numerics import compiled

        return compiled.encode_e4m3(x, scale, rows, columns, divide)
    return to_e4m3(_each(torch.div if divide else torch.mul, x.float(), scale, rows, columns))


def decode_e4m3(
    codes: torch.Tensor, scale: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Values code * scale."""
    if _compiled(codes):
        from syncline.numerics import compiled

        return compiled.decode_e4m3(codes, scale, rows, columns, dtype)
    return _each(torch.mul, codes.float(), scale, rows, columns).to(dtype)


def encode_e2m1(x: torch.Tensor, scale: torch.Tensor, columns: int) -> torch.Tensor:
    """uint8 [.., K/2], two E2M1 codes of x * scale in a byte. Blocks are whole rows' parts: K % columns is 0."""
    if _compiled(x):
        from syncline.numerics import compiled

        return compiled.encode_e2m1(x, scale, columns)
    return pack_nibbles(to_e2m1(_each(torch.mul, x.float(), scale, 1, columns)))


def decode_e2m1(packed: torch.Tensor, scale: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Values code * scale, [.., K]."""
    if _compiled(packed):
        from syncline.numerics import compiled

        return compiled.decode_e2m1(packed, scale, columns, dtype)
    return _each(torch.mul, from_e2m1(unpack_nibbles(packed)), scale, 1, columns).to(dtype)


def encode_int4(x: torch.Tensor, scale: torch.Tensor, columns: int, least: int) -> torch.Tensor:
    """int32 [.., ceil(K/8)], eight codes `least` .. 7 of x / scale in a word."""
    if _compiled(x):
        from syncline.numerics import compiled

        return compiled.encode_int4(x, scale, columns, least)
    codes = _each(torch.div, x.float(), scale, 1, columns).round().clamp(least, 7)
    return pack_words(codes.to(torch.int8))


def decode_int4(
    words: torch.Tensor, scale: torch.Tensor, columns: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    """Values code * scale, [.., k]; words and scales of padding beyond `k` are left out."""
    if _compiled(words):
        from syncline.numerics import compiled

        return compiled.decode_int4(words, scale, columns, k, dtype)
    return _each(torch.mul, unpack_words(words, k).float(), scale, 1, columns).to(dtype)


def _compiled(x: torch.Tensor) -> bool:
    return COMPILED and x.device.type == "cpu" and x.numel() > 0


def _each(
    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    scale: torch.Tensor,
    rows: int,
    columns: int,
) -> torch.Tensor:
    """`operation` of each value and its block's scale."""
    if rows == 1 and x.shape[-1] % columns == 0 and scale.shape[-1] * columns == x.shape[-1]:
        return operation(blocked(x, columns), scale.unsqueeze(-1)).flatten(-2)
    wide = scale.repeat_interleave(columns, -1)[..., : x.shape[-1]]
    if rows > 1:
        wide = wide.repeat_interleave(rows, -2)[..., : x.shape[-2], :]
    return operation(x, wide)

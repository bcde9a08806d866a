"""The functions of `blockwise.py` for CPU tensors: their memory goes to `kernels.py`, a band of rows to each thread.

As many threads as torch has (`torch.get_num_threads()`, so `OMP_NUM_THREADS`), started for the call: only large tensors
are worth it, and a pool that outlives a call would not survive a fork. Bytes do not depend on their number.

Outputs are made by numpy, which asks for huge pages: a fresh output of 32 MB costs its writer 16 page faults instead of
8192, and those took longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
import torch

from syncline.numerics import kernels
from syncline.numerics.kernels import Array

SHARE = 1 << 18
"""Values for which one more thread pays."""


def block_amax(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    bits, shift = _bits(x)
    n, k, bands = _sizes(x.shape, rows)
    shape = _blocks(x.shape, rows, columns)
    out = np.empty(prod(shape), bits.dtype)
    sign = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    _run(
        lambda low, high: kernels.amax(bits, out, n, k, rows, columns, sign, low, high),
        x.numel(),
        bands,
    )
    return torch.from_numpy(out.astype(np.uint32) << shift).view(torch.float32).view(shape)


def encode_e4m3(x: torch.Tensor, scale: torch.Tensor, rows: int, columns: int, divide: bool) -> torch.Tensor:
    bits, shift = _bits(x)
    n, k, bands = _sizes(x.shape, rows)
    factors = _factors(scale, _blocks(x.shape, rows, columns))
    out = np.empty(bits.size, np.uint8)
    _run(
        lambda low, high: kernels.encode_e4m3(
            bits, factors, out, n, k, rows, columns, divide, shift, low, high
        ),
        x.numel(),
        bands,
    )
    return torch.from_numpy(out).view(torch.float8_e4m3fn).view(x.shape)


def decode_e4m3(
    codes: torch.Tensor, scale: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    raw = _bytes(codes)
    n, k, bands = _sizes(codes.shape, rows)
    factors = _factors(scale, _blocks(codes.shape, rows, columns))
    out, shift = _values(raw.size, dtype)
    _run(
        lambda low, high: kernels.decode_e4m3(raw, factors, out, n, k, rows, columns, shift, low, high),
        raw.size,
        bands,
    )
    return _floats(out, codes.shape, dtype)


def encode_e2m1(x: torch.Tensor, scale: torch.Tensor, columns: int) -> torch.Tensor:
    bits, shift = _bits(x)
    n, k, _ = _sizes(x.shape, 1)
    factors = _factors(scale, (*x.shape[:-1], k // columns))
    if columns % 2 or k % columns:
        raise ValueError(f"K = {k} is no multiple of {columns}, an even number")
    out = np.empty(bits.size // 2, np.uint8)
    _run(
        lambda low, high: kernels.encode_e2m1(bits, factors, out, k, columns, shift, low, high),
        x.numel(),
        n,
    )
    return torch.from_numpy(out).view(*x.shape[:-1], k // 2)


def decode_e2m1(packed: torch.Tensor, scale: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    raw = _bytes(packed)
    n, half, _ = _sizes(packed.shape, 1)
    factors = _factors(scale, (*packed.shape[:-1], 2 * half // columns))
    out, shift = _values(2 * raw.size, dtype)
    _run(
        lambda low, high: kernels.decode_e2m1(raw, factors, out, 2 * half, columns, shift, low, high),
        2 * raw.size,
        n,
    )
    return _floats(out, (*packed.shape[:-1], 2 * half), dtype)


def encode_int4(x: torch.Tensor, scale: torch.Tensor, columns: int, least: int) -> torch.Tensor:
    bits, shift = _bits(x)
    n, k, _ = _sizes(x.shape, 1)
    factors = _factors(scale, _blocks(x.shape, 1, columns))
    out = np.empty(n * -(-k // 8), np.uint32)
    bottom = np.float32(least)
    _run(
        lambda low, high: kernels.encode_int4(bits, factors, out, k, columns, bottom, shift, low, high),
        x.numel(),
        n,
    )
    return torch.from_numpy(out.view(np.int32)).view(*x.shape[:-1], -(-k // 8))


def decode_int4(
    words: torch.Tensor, scale: torch.Tensor, columns: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    n, per_row, _ = _sizes(words.shape, 1)
    if per_row * 8 < k or scale.shape[-1] * columns < k:
        raise ValueError(f"{per_row} words and {scale.shape[-1]} scales a row are too few for K = {k}")
    factors = _factors(scale, (*words.shape[:-1], scale.shape[-1]))
    raw = words.detach().contiguous().view(torch.int32).numpy().reshape(-1).view(np.uint32)
    out, shift = _values(n * k, dtype)
    stride = scale.shape[-1]
    _run(
        lambda low, high: kernels.decode_int4(
            raw, factors, out, k, columns, per_row, stride, shift, low, high
        ),
        n * k,
        n,
    )
    return _floats(out, (*words.shape[:-1], k), dtype)


# ---- memory ---------------------------------------------------------------------------------------------------
def _bits(x: torch.Tensor) -> tuple[Array, np.uint32]:
    """The bits of `x`, flat, and how far they lie below those of float32."""
    flat = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().reshape(-1).view(np.uint16), np.uint32(16)
    return flat.float().numpy().reshape(-1).view(np.uint32), np.uint32(0)


def _bytes(codes: torch.Tensor) -> Array:
    return codes.detach().contiguous().view(torch.uint8).numpy().reshape(-1)


def _values(count: int, dtype: torch.dtype) -> tuple[Array, np.uint32]:
    """Where the bits of `count` decoded values go, and how far they lie below those of float32."""
    if dtype == torch.bfloat16:
        return np.empty(count, np.uint16), np.uint32(16)
    return np.empty(count, np.uint32), np.uint32(0)


def _floats(out: Array, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).view(shape)
    return torch.from_numpy(out.view(np.float32)).view(shape).to(dtype)


def _factors(scale: torch.Tensor, shape: tuple[int, ...]) -> Array:
    """One float32 per block. Raises `ValueError` for another number: machine code checks no index."""
    if tuple(scale.shape) != shape:
        raise ValueError(f"scales of shape {list(scale.shape)} for blocks of shape {list(shape)}")
    return scale.detach().float().contiguous().numpy().reshape(-1)


def _blocks(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...]:
    """Blocks of a tensor of `shape`."""
    last = -(-shape[-1] // columns)
    return (*shape[:-1], last) if rows == 1 else (*shape[:-2], -(-shape[-2] // rows), last)


def _sizes(shape: tuple[int, ...], rows: int) -> tuple[int, int, int]:
    """Rows of a matrix, K, and bands of `rows` rows in the whole stack. Single rows are one matrix."""
    if rows == 1:
        return prod(shape[:-1]), shape[-1], prod(shape[:-1])
    return shape[-2], shape[-1], prod(shape[:-2]) * -(-shape[-2] // rows)


# ---- threads --------------------------------------------------------------------------------------------------
def _run(work: Callable[[int, int], None], values: int, bands: int) -> None:
    """Do bands 0 .. `bands`, in equal shares at once where there are many values."""
    threads = max(1, min(torch.get_num_threads(), bands, values // SHARE))
    if threads == 1:
        work(0, bands)
        return
    edges = [bands * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, edges[:-1], edges[1:]))

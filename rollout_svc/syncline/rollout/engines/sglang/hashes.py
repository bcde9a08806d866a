"""The server's hash of one parameter, on CPU and on CUDA, made here of the same bytes.

Source: SGLang 0.5.23. On CPU the first 8 bytes of the sha256 (`utils/weight_checker.py`, `managers/mm_utils.py`); on
CUDA a Triton kernel over 32-bit words (`kernels/ops/memory/gpu_tensor_hash.py`), which the tests run in Triton's
interpreter beside `cuda_checksum`. No GPU has been asked yet.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint32]
_TILE = 8192  # words that one partial hash is over
_AT_ONCE = 128 * _TILE
_MOST = 1 << 31  # words whose index the kernel can hold
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))  # factor, rotation
_ALL = (1 << 64) - 1


def checksum(tensor: Tensor) -> str:
    """16 hex digits: the server's hash of a CPU tensor."""
    return hashlib.sha256(_raw(tensor).data).hexdigest()[:16]


def cuda_checksum(tensor: Tensor) -> str:
    """16 hex digits: the server's hash of a CUDA tensor with these values. Raises `ValueError` beyond 8 GiB."""
    raw = _raw(tensor)
    words: Words = np.pad(raw, (0, -len(raw) % 4)).view("<u4")
    if len(words) >= _MOST:
        raise ValueError(f"{len(raw)} bytes: the server's CUDA hash counts words in 31 bits")
    total = 0
    for first in range(0, len(words), _AT_ONCE):
        total += _tiles(words[first : first + _AT_ONCE], first, len(words))
    return f"{_final(total & _ALL) if len(words) else 0:016x}"


def _tiles(words: Words, first: int, count: int) -> int:
    """Sum of the partial hashes of whole tiles, of a tensor of `count` words; `first` is a tile's first."""
    at: Words = np.arange(first, first + len(words), dtype=np.uint32)
    edges = np.arange(0, len(words), _TILE)
    halves = []
    for seed, (factor, turn) in zip(_SEEDS, _PLACES, strict=True):
        place = (at * np.uint32(factor) + np.uint32(seed)) ^ (
            (at << np.uint32(turn)) | (at >> np.uint32(32 - turn))
        )
        sums = np.add.reduceat(_mixed(words ^ place), edges, dtype=np.uint32)
        halves.append(_mixed(sums ^ np.uint32(count * 4 & 0xFFFFFFFF)).astype(np.uint64))
    joined = (halves[0] << np.uint64(32)) | halves[1]
    return int(joined.sum(dtype=np.uint64))


def _mixed(x: Words) -> Words:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _final(x: int) -> int:
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & _ALL
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & _ALL
    return x ^ (x >> 31)


def _raw(tensor: Tensor) -> NDArray[np.uint8]:
    raw: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw  # type: ignore[no-any-return]

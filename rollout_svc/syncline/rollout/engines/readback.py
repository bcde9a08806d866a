"""What an engine's buffer holds, told as the bytes of a version: the digest of what the forward pass will read.

Nothing here allocates more than `CHUNK` bytes: fresh pages cost more than hashing what is put on them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 20  # bytes of a version that are narrowed and hashed together: they stay in the core's own cache


def fill(own: Tensor, source: Tensor) -> str:
    """Write `source` to the engine's view `own` (any strides) and return the digest of what can be read there then,
    as bytes of the source's dtype. Without gradients; neither lets another thread wait for Python.
    """
    with torch.inference_mode():  # a thread's own; the buffer may have been made in it, or outside
        own.copy_(source)
    return digest_of(own, source.dtype)


def digest_of(own: Tensor, dtype: torch.dtype) -> str:
    """sha256 hex of the values of `own` [any shape and strides] as little-endian bytes of `dtype` in C order.

    FP32 values that are told as BF16 and are none give the digest of their FP32 bytes, which is no BF16 tensor's:
    rounding would hide what the forward pass reads.
    """
    if own.dtype == dtype and own.is_contiguous():
        return hashlib.sha256(_bytes(own)).hexdigest()
    digest = hashlib.sha256()
    rows = own if own.dim() else own.reshape(1)
    step = max(1, CHUNK // max(1, rows[:1].numel() * dtype.itemsize))
    narrow = torch.empty((min(step, len(rows)), *rows.shape[1:]), dtype=dtype)
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        if not _fits(part, dtype):
            return digest_of(own, own.dtype)
        made = narrow[: len(part)]
        with torch.inference_mode():
            made.copy_(part)
        digest.update(_bytes(made))
    return digest.hexdigest()


def _fits(part: Tensor, dtype: torch.dtype) -> bool:
    """Whether `part` loses nothing in `dtype`. Looked at for FP32 alone: nothing else is held wider than it travels."""
    if (part.dtype, dtype) != (torch.float32, torch.bfloat16):
        return True
    lower: int = np.bitwise_or.reduce(part.view(torch.int32).numpy(), axis=None)
    return not int(lower) & 0xFFFF


def _bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as something to hash."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data

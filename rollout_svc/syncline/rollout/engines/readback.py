"""What an engine's buffer holds, told as the bytes of a version: the digest of what the forward pass will read.

A blob comes through a thread's own `Scratch`, piece by piece: read, widened into the buffer, read back from there,
narrowed, hashed, all while the piece is in the core's cache. Nothing is allocated or mapped per tensor: fresh pages
cost more than hashing what is put on them, and so do the calls that make them.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 19
"""Bytes of a version that are brought and hashed together; fewer, and threads wait for Python oftener."""


class BlobChanged(RuntimeError):
    """A blob that is shorter than it was when its reading began."""


class Scratch:
    """One thread's memory for the tensors that it brings: a piece as it is read, and one as it is read back."""

    def __init__(self) -> None:
        self._read = torch.empty(CHUNK, dtype=torch.uint8)
        self._back = torch.empty(CHUNK, dtype=torch.uint8)
        self._raw: memoryview = self._read.numpy().data

    def pour(self, own: Tensor, blob: int, dtype: torch.dtype) -> str:
        """Write the values of `blob` to contiguous `own`, and return the digest of what can be read there then.

        blob   descriptor of a file with as many bytes as `own` has in `dtype`, which is not checked
        Raises `BlobChanged`, `OSError`.
        """
        flat = own.detach().view(-1)
        if own.dtype == dtype:
            return _straight(flat, blob)
        digest = hashlib.sha256()
        step = CHUNK // dtype.itemsize
        source, back = self._read.view(dtype), self._back.view(dtype)
        with torch.inference_mode():  # a thread's own; the buffer may have been made in it, or outside
            for at in range(0, len(flat), step):
                part = flat[at : at + step]
                size = len(part) * dtype.itemsize
                _read(blob, self._raw[:size], at * dtype.itemsize)
                part.copy_(source[: len(part)])
                if not _fits(part, dtype):
                    return digest_of(own, own.dtype)
                made = back[: len(part)]
                made.copy_(part)
                digest.update(_bytes(made))
        return digest.hexdigest()


def _straight(flat: Tensor, blob: int) -> str:
    """`pour` where the engine holds a tensor as it travels: read to where it belongs, and hashed there."""
    digest = hashlib.sha256()
    raw = _bytes(flat)
    for at in range(0, raw.nbytes, CHUNK):
        part = raw[at : at + CHUNK]
        _read(blob, part, at)
        digest.update(part)
    return digest.hexdigest()


def _read(blob: int, into: memoryview, at: int) -> None:
    """Fill `into` from byte `at` of the file on."""
    done = os.preadv(blob, [into], at)
    while done < len(into):
        more = os.preadv(blob, [into[done:]], at + done)
        if not more:
            raise BlobChanged(f"a blob ends at byte {at + done}, and was longer before")
        done += more


def fill(own: Tensor, source: Tensor) -> str:
    """Write `source` to the engine's view `own` (any strides) and return the digest of what can be read there then,
    as bytes of the source's dtype. Without gradients; neither lets another thread wait for Python.

    All is written before anything is read back: of a view whose strides overlap no piece would tell.
    """
    with torch.inference_mode():
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
    rows = own.reshape(-1) if own.is_contiguous() else own
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

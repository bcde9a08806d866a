"""Wide values of a BF16 rollout: rounding on integers, and the refusal of what is not finite.

A BF16 value is the upper half of an FP32 one, rounded to nearest, ties to even.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from syncline.sync.export import BadExport, Fact, RawTensor, refuse_where

CHUNK = 1 << 18  # elements rounded at a time
KEPT = frozenset({"I64", "I32", "I16", "I8", "U8", "BOOL"})
_FLOATS = {"BF16": "<u2", "F32": "<u4", "F16": "<f2"}


def bf16(tensor: RawTensor) -> tuple[str, Any]:
    """Dtype and bytes (contiguous array) of `tensor` for a BF16 rollout.

    BF16 passes unchanged; F32 is rounded to nearest even; F16 widens exactly and is rounded; integers and
    booleans are kept. F64 is refused: a trainer that holds it has a contract of its own. Raises `NonFinite`,
    also for a finite value that rounds to infinity.
    """
    if tensor.dtype in KEPT:
        return tensor.dtype, tensor.data
    if tensor.dtype == "BF16":
        for _ in _chunks(tensor):
            pass
        return "BF16", tensor.data
    rounded = np.empty(tensor.data.nbytes // np.dtype(_code(tensor)).itemsize, "<u2")
    at = 0
    for chunk in _chunks(tensor):
        rounded[at : at + len(chunk)] = chunk
        at += len(chunk)
    return "BF16", rounded


def rounded_fact(fact: Fact) -> Fact:
    """What `bf16` makes of a tensor."""
    return fact if fact.dtype in KEPT else Fact("BF16", fact.shape)


def digest(tensor: RawTensor) -> str:
    """sha256 hex of what `bf16` makes of `tensor`, without holding it. Raises as `bf16`."""
    if tensor.dtype in KEPT:
        return hashlib.sha256(tensor.data).hexdigest()
    found = hashlib.sha256()
    for chunk in _chunks(tensor):
        found.update(chunk)
    return found.hexdigest()


def _chunks(tensor: RawTensor) -> Iterator[Any]:
    """The values in chunks of BF16 bits. Raises `NonFinite`, `BadExport`."""
    values = tensor.data.view(_code(tensor))
    for start in range(0, len(values), CHUNK):
        part = values[start : start + CHUNK]
        if tensor.dtype == "BF16":
            refuse_where(tensor, (part & 0x7F80) == 0x7F80, start)
            yield part
            continue
        bits = part.astype("<f4").view("<u4") if tensor.dtype == "F16" else part
        # + 0x7FFF, and one more if the kept part is odd: round half to even
        half = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        # the sum wraps for some NaN, so both the source and the result are looked at
        refuse_where(tensor, ((bits & 0x7F800000) == 0x7F800000) | ((half & 0x7F80) == 0x7F80), start)
        yield half.astype("<u2")


def _code(tensor: RawTensor) -> str:
    if tensor.dtype not in _FLOATS:
        raise BadExport(f"tensor {tensor.name} has dtype {tensor.dtype}, which has no BF16 conversion")
    return _FLOATS[tensor.dtype]

"""The few things that numpy arrays and torch tensors do under different names."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from syncline.contract import exports

Array = Any
"""`numpy.ndarray` or `torch.Tensor`, in any dtype; BF16 and FP8 in numpy are unsigned integers of their width."""


WIDTHS = exports.WIDTHS | {"U64": 8, "U32": 4, "U16": 2, "F8_E5M2": 1, "F8_E8M0": 1}
"""Bytes per element, by safetensors' name of the dtype."""
_NAMES = {"bfloat16": "BF16", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_NAMES |= {"float8_e8m0fnu": "F8_E8M0"}
_NAMES |= {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}"
    for kind in ("float", "int", "uint")
    for bits in (8, 16, 32, 64)
}


def dtype_of(array: Array) -> str:
    """Safetensors' name of the dtype of `array`. Raises `ValueError` for one that has none."""
    name = str(array.dtype).removeprefix("torch.")
    if _NAMES.get(name) not in WIDTHS:
        raise ValueError(f"dtype {array.dtype} has no name in safetensors")
    return _NAMES[name]


def zeros(shape: tuple[int, ...], like: Array) -> Array:
    """A new array of zeros of `like`'s kind, dtype and device."""
    return np.zeros(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_zeros(shape)


def raw(array: Array) -> memoryview:
    """The bytes of `array` in C order; a copy only where it does not lie so, or not in main memory."""
    if not isinstance(array, np.ndarray):
        import torch  # whoever hands over a tensor has loaded it

        array = array.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def digest(array: Array) -> str:
    """sha256 hex of the raw bytes, as in `TensorEntry.digest`."""
    return hashlib.sha256(raw(array)).hexdigest()


def equal(one: Array, other: Array) -> bool:
    """Whether both hold the same bytes; NaN equals itself, 0 and -0 differ."""
    return one.shape == other.shape and one.dtype == other.dtype and raw(one) == raw(other)


def region(array: Array, axis: int, start: int, stop: int, slot: int | None = None) -> Array:
    """View of `array[slot][..., start:stop, ...]`; a scalar is a region of length 1."""
    view = array if slot is None else array[slot : slot + 1] if array.ndim == 1 else array[slot]
    if view.ndim == 0:
        return view.reshape(1)
    return view[(slice(None),) * axis + (slice(start, stop),)]

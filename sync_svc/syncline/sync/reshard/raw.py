"""Tensors of an export as arrays that shards are cut from, and back as tensors that conversion reads. No copies."""

from __future__ import annotations

import numpy as np

from syncline.sync.export import BadExport, RawTensor
from syncline.sync.reshard.arrays import WIDTHS, Array, raw


def array_of(tensor: RawTensor) -> Array:
    """The elements of `tensor` as unsigned integers of their width, in its shape. Raises `BadExport`."""
    if tensor.dtype not in WIDTHS:
        raise BadExport(f"tensor {tensor.name} has dtype {tensor.dtype}; known are {', '.join(WIDTHS)}")
    return tensor.data.view(f"<u{WIDTHS[tensor.dtype]}").reshape(tensor.shape)


def tensor_of(name: str, dtype: str, array: Array) -> RawTensor:
    """`array`, whose elements are `dtype`'s (safetensors' name), as the tensor `name`."""
    return RawTensor(
        name=name, dtype=dtype, shape=tuple(array.shape), data=np.frombuffer(raw(array), np.uint8)
    )

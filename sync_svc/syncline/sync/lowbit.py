"""Low-bit weights of an export: quantised by `numerics`, in the parts of `contract/artefact.py`.

The one module of this package that imports torch; `convert` imports it when sync quantises.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

import numpy as np
import torch

from syncline.contract.artefact import Part
from syncline.contract.plan import PlanEntry
from syncline.numerics.checkpoint import BAND, Rows, encoded_parts, largest, outer_groups, outer_of
from syncline.numerics.quantized import NotQuantizable
from syncline.sync.export import BadExport, RawTensor, refuse_where

__all__ = ["amax", "outer_groups", "outer_of", "quantised"]


def amax(tensor: RawTensor, entry: PlanEntry) -> float:
    """Largest magnitude in `tensor`. Raises `NonFinite`, `BadExport`."""
    found = largest(_rows(tensor, entry.shape[1]), entry)
    if not isfinite(found):
        _refuse_non_finite(tensor)
    return found


def quantised(
    tensor: RawTensor, entry: PlanEntry, outer: torch.Tensor | None
) -> Iterator[tuple[Part, np.ndarray[Any, Any]]]:
    """`encoded_parts` of `tensor`; an nvfp4 one without `outer` has its outer scale for itself.

    Raises `NonFinite` naming tensor and index; `BadExport`, also where a dequantised value would not be finite.
    """
    if outer is None and entry.weight is not None and entry.weight.format == "nvfp4":
        outer = outer_of([amax(tensor, entry)], entry)
    try:
        yield from encoded_parts(_rows(tensor, entry.shape[1]), entry, outer)
    except NotQuantizable as error:
        _refuse_non_finite(tensor)
        raise BadExport(str(error)) from None


def _rows(tensor: RawTensor, k: int) -> Rows:
    """Bands as they are stored, copied: the mapped file cannot be written to, and torch has no tensors of that kind.

    Whether values are finite, the quantisers find in the block maxima that they take anyway. Raises `BadExport`.
    """
    values, dtype = _stored(tensor)
    return lambda first, last: (
        torch.from_numpy(values[first * k : last * k].copy()).view(dtype).view(last - first, k)
    )


def _stored(tensor: RawTensor) -> tuple[Any, torch.dtype]:
    """All values as numpy sees them, and what torch makes of them. Raises `BadExport`."""
    match tensor.dtype:
        case "BF16":
            return tensor.data.view("<i2"), torch.bfloat16
        case "F32":
            return tensor.data.view("<f4"), torch.float32
        case "F16":
            return tensor.data.view("<f2"), torch.float16
        case _:
            raise BadExport(f"tensor {tensor.name} has dtype {tensor.dtype}, which has no low-bit conversion")


def _refuse_non_finite(tensor: RawTensor) -> None:
    """Raise `NonFinite` at the first value that is not finite."""
    values, dtype = _stored(tensor)
    for start in range(0, len(values), BAND):
        band = torch.from_numpy(values[start : start + BAND].copy()).view(dtype)
        refuse_where(tensor, ~torch.isfinite(band).numpy(), start)

"""Low-bit weights of an export: quantised by `numerics`, in the parts of `contract/artefact.py`.

The one module of this package that imports torch; `convert` imports it when sync quantises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from syncline.contract.artefact import Part
from syncline.contract.plan import PlanEntry
from syncline.numerics.checkpoint import Rows, encoded_parts, largest, outer_groups, outer_of
from syncline.numerics.quantized import NotQuantizable
from syncline.sync.export import BadExport, RawTensor, refuse_where

__all__ = ["amax", "outer_groups", "outer_of", "quantised"]


def amax(tensor: RawTensor, entry: PlanEntry) -> float:
    """Largest magnitude in `tensor`. Raises `NonFinite`, `BadExport`."""
    return largest(_rows(tensor, entry.shape[1]), entry)


def quantised(
    tensor: RawTensor, entry: PlanEntry, outer: torch.Tensor | None
) -> Iterator[tuple[Part, np.ndarray[Any, Any]]]:
    """`encoded_parts` of `tensor`; an nvfp4 one without `outer` has its outer scale for itself.

    Raises `NonFinite` naming tensor and index; `BadExport`, also where a dequantised value would not be finite.
    """
    rows = _rows(tensor, entry.shape[1])
    if outer is None and entry.weight is not None and entry.weight.format == "nvfp4":
        outer = outer_of([largest(rows, entry)], entry)
    try:
        yield from encoded_parts(rows, entry, outer)
    except NotQuantizable as error:
        raise BadExport(str(error)) from None


def _rows(tensor: RawTensor, k: int) -> Rows:
    return lambda first, last: torch.from_numpy(_values(tensor, first * k, last * k).reshape(last - first, k))


def _values(tensor: RawTensor, start: int, stop: int) -> Any:
    """float32 copy of flat elements `start` to `stop`. Raises `NonFinite`, `BadExport`."""
    match tensor.dtype:
        case "BF16":
            bits = tensor.data.view("<u2")[start:stop].astype("<u4") << 16
            values = bits.view("<f4")
        case "F32":
            values = tensor.data.view("<f4")[start:stop].copy()
        case "F16":
            values = tensor.data.view("<f2")[start:stop].astype("<f4")
        case _:
            raise BadExport(f"tensor {tensor.name} has dtype {tensor.dtype}, which has no low-bit conversion")
    refuse_where(tensor, ~np.isfinite(values), start)
    return values

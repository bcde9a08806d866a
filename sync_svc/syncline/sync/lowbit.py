"""Low-bit weights of an export: quantised by `numerics`, band by band, in the parts of `contract/artefact.py`.

The one module of this package that imports torch; `convert` imports it when a contract has families. A band is as many
whole rows of blocks as make about a million values, so that memory beyond the mapped export is the parts of one tensor
and a few bands, whatever the tensor's size. Bands do not change bytes: no scale reaches over a band's edge but nvfp4's
outer one, which is known before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from syncline.contract.artefact import Part, parts
from syncline.contract.plan import PlanEntry
from syncline.contract.schemes import Scheme
from syncline.numerics.quantized import NotQuantizable, Quantized, outer_scale, quantize
from syncline.sync.export import BadExport, RawTensor, refuse_where

BAND = 1 << 20  # values quantised at a time
_NUMPY = {"F8_E4M3": "u1", "U8": "u1", "I32": "<i4", "I64": "<i8", "F32": "<f4"}


def outer_scales(entries: tuple[PlanEntry, ...], tensors: Mapping[str, RawTensor]) -> dict[str, torch.Tensor]:
    """Outer scale of each nvfp4 tensor by name; those under one `PlanEntry.outer` share one. Reads amax alone.

    Raises `NonFinite`, `BadExport`.
    """
    groups: dict[str, list[PlanEntry]] = {}
    for entry in entries:
        if entry.weight is not None and entry.weight.format == "nvfp4":
            groups.setdefault(entry.outer or entry.name, []).append(entry)
    found = {}
    for members in groups.values():
        largest = [_amax(tensors[entry.name]) for entry in members]
        for entry in members:
            found[entry.name] = outer_scale([torch.tensor(largest)], _scheme(entry))
    return found


def quantised(
    tensor: RawTensor, entry: PlanEntry, outer: torch.Tensor | None
) -> Iterator[tuple[Part, np.ndarray[Any, Any]]]:
    """Each part of `tensor` under low-bit `entry`, with its array (contiguous, of the part's dtype and shape).

    outer   its outer scale, for nvfp4
    Raises `NonFinite` naming tensor and index, also where a dequantised value would not be finite; `BadExport`.
    """
    scheme = _scheme(entry)
    listed = parts(entry)
    arrays = {part.role: np.empty(part.shape, _NUMPY[part.dtype]) for part in listed}
    n, k = entry.shape
    step = max(BAND // k // scheme.rows, 1) * scheme.rows
    for row in range(0, n, step):
        done = _band(tensor, scheme, outer, row, min(row + step, n), k)
        last = row + done.codes.shape[0]
        arrays["codes"][row:last] = _array(done.codes)
        arrays["scale"][row // scheme.rows : -(-last // scheme.rows)] = _array(done.scale)
    if outer is not None:
        arrays["outer"][()] = outer.item()
    if "shape" in arrays:
        arrays["shape"][:] = (n, k)
    for part in listed:
        yield part, arrays.pop(part.role)


def _band(
    tensor: RawTensor, scheme: Scheme, outer: torch.Tensor | None, first: int, last: int, k: int
) -> Quantized:
    values = _values(tensor, first * k, last * k).reshape(last - first, k)
    try:
        return quantize(torch.from_numpy(values), scheme, f"tensor {tensor.name}, from row {first},", outer)
    except NotQuantizable as error:
        raise BadExport(str(error)) from None


def _amax(tensor: RawTensor) -> float:
    size = int(np.prod(tensor.shape, dtype=np.int64))
    bands = (_values(tensor, at, min(at + BAND, size)) for at in range(0, size, BAND))
    return max(float(np.abs(band).max()) for band in bands)


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


def _array(stored: torch.Tensor) -> Any:
    return (stored.view(torch.uint8) if stored.dtype == torch.float8_e4m3fn else stored).numpy()


def _scheme(entry: PlanEntry) -> Scheme:
    if entry.weight is None:
        raise AssertionError(f"tensor {entry.name} is wide")
    return entry.weight

"""A weight as the checkpoint tensors of its scheme (`contract/artefact.py`), band by band: for sync and trainers.

A band is as many whole rows of blocks as make about a million values, so that memory beyond the source is
the parts of one tensor and a few bands, whatever the tensor's size. Bands do not change bytes: no scale reaches over a
band's edge but nvfp4's outer one, which is known before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from syncline.contract.artefact import Part, parts
from syncline.contract.plan import PlanEntry
from syncline.contract.schemes import Scheme
from syncline.numerics.blockwise import block_amax
from syncline.numerics.quantized import outer_scale, quantize

BAND = 1 << 20  # values quantised at a time
Rows = Callable[[int, int], torch.Tensor]
"""(first, last) -> rows first .. last of a weight: float32, bfloat16 or float16 [last - first, K]."""
NUMPY = {"F8_E4M3": "u1", "U8": "u1", "I32": "<i4", "I64": "<i8", "F32": "<f4"}
"""numpy's dtype of the artefact's, by safetensors' name."""


def encoded_parts(
    rows: Rows, entry: PlanEntry, outer: torch.Tensor | None
) -> Iterator[tuple[Part, np.ndarray[Any, Any]]]:
    """Each part of the weight under low-bit `entry`, with its array (contiguous, of the part's dtype and shape).

    outer   its outer scale, for nvfp4
    E4M3 is held as uint8. Raises `NotQuantizable` naming the tensor and the band's first row.
    """
    scheme = scheme_of(entry)
    listed = parts(entry)
    arrays = {part.role: np.empty(part.shape, NUMPY[part.dtype]) for part in listed}
    for first, last in bands(entry):
        where = f"tensor {entry.name}, from row {first},"
        done = quantize(rows(first, last), scheme, where, outer)
        arrays["codes"][first:last] = _array(done.codes)
        arrays["scale"][first // scheme.rows : -(-last // scheme.rows)] = _array(done.scale)
    if outer is not None:
        arrays["outer"][()] = outer.item()
    if "shape" in arrays:
        arrays["shape"][:] = entry.shape
    for part in listed:
        yield part, arrays.pop(part.role)


def bands(entry: PlanEntry) -> Iterator[tuple[int, int]]:
    """First and last row of each band of `entry`'s weight."""
    n, k = entry.shape
    rows = scheme_of(entry).rows
    step = max(BAND // k // rows, 1) * rows
    for first in range(0, n, step):
        yield first, min(first + step, n)


def largest(rows: Rows, entry: PlanEntry) -> float:
    """Largest magnitude in the weight; infinite or no number if one of its values is."""
    k = entry.shape[1]
    found = [block_amax(rows(first, last), 1, k).amax() for first, last in bands(entry)]
    return float(torch.stack(found).amax())


def outer_of(largests: Iterable[float], entry: PlanEntry) -> torch.Tensor:
    """The outer scale of weights with these largest magnitudes, which share one: nvfp4 `entry`'s and its partners'."""
    return outer_scale([torch.tensor(list(largests))], scheme_of(entry))


def outer_groups(entries: Iterable[PlanEntry]) -> list[list[PlanEntry]]:
    """The nvfp4 ones among `entries`, those that share an outer scale together."""
    groups: dict[str, list[PlanEntry]] = {}
    for entry in entries:
        if entry.weight is not None and entry.weight.format == "nvfp4":
            groups.setdefault(entry.outer or entry.name, []).append(entry)
    return list(groups.values())


def scheme_of(entry: PlanEntry) -> Scheme:
    """The scheme of an entry that is low-bit."""
    if entry.weight is None:
        raise AssertionError(f"tensor {entry.name} is wide")
    return entry.weight


def _array(stored: torch.Tensor) -> Any:
    return (stored.view(torch.uint8) if stored.dtype == torch.float8_e4m3fn else stored).numpy()

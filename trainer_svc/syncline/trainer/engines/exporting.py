"""Weights of this process as files of an export: as they are, or as the codes and scales that rollout will hold.

Each tensor is cast, or quantised, when it is its turn to be written, and dropped before the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from syncline.contract.artefact import parts
from syncline.contract.exports import CONVERTED_FILE, ConvertedExport
from syncline.contract.plan import PlanEntry, PrecisionPlan
from syncline.numerics.checkpoint import Rows, encoded_parts, largest, outer_groups, outer_of
from syncline.runtime.export_files import write_file, write_tensors

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.float64: "F64"}
_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
_NAMES |= {torch.uint8: "U8", torch.bool: "BOOL"}

Facts = dict[str, tuple[str, tuple[int, ...]]]


def write_wide(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """Write `weights` (checkpoint name -> tensor, on any device) to `path`, floating ones as `dtype`.

    Returns the file's sha256 hex. Raises `ValueError` naming a tensor whose dtype has no name in safetensors.
    """
    facts: Facts = {name: (_name(name, t, dtype), tuple(t.shape)) for name, t in weights.items()}
    given = ((name, raw(_cast(t, dtype))) for name, t in weights.items())
    return write_tensors(path, facts, given, stamped=False).sha256


def write_converted(
    folder: Path, file: str, weights: Mapping[str, Tensor], dtype: torch.dtype, plan: PrecisionPlan
) -> dict[str, str]:
    """Write what sync would make of `weights` exported as `dtype`: `file`, and `converted.json`. File -> sha256 hex.

    plan   of all `weights` but an adapter's, which are wide

    Raises `NotQuantizable` naming the tensor; `ValueError` as `write_wide`.
    """
    low = {entry.name: entry for entry in plan.low_bit()}
    rest = {name: t for name, t in weights.items() if name not in low}
    facts: Facts = {name: (_name(name, t, torch.bfloat16), tuple(t.shape)) for name, t in rest.items()}
    facts |= {part.name: (part.dtype, part.shape) for entry in low.values() for part in parts(entry)}
    outer = {
        entry.name: outer_of([largest(_rows(weights[e.name], dtype), e) for e in group], entry)
        for group in outer_groups(low.values())
        for entry in group
    }
    wrote = write_tensors(folder / file, facts, _converted(weights, dtype, low, outer), stamped=False)
    told = ConvertedExport(plan=plan.digest(), shapes={entry.name: entry.shape for entry in plan.entries})
    return {
        file: wrote.sha256,
        CONVERTED_FILE: write_file(folder / CONVERTED_FILE, msgspec.json.encode(told)),
    }


def raw(tensor: Tensor) -> memoryview:
    """The bytes of `tensor` in C order; a copy only where it does not lie so, or not in main memory."""
    view: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data
    return view


def _converted(
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    low: Mapping[str, PlanEntry],
    outer: Mapping[str, Tensor],
) -> Iterator[tuple[str, memoryview]]:
    for name, tensor in weights.items():
        if name not in low:
            yield name, raw(_cast(_cast(tensor, dtype), torch.bfloat16))
            continue
        for part, array in encoded_parts(_rows(tensor, dtype), low[name], outer.get(name)):
            yield part.name, array.data


def _rows(tensor: Tensor, dtype: torch.dtype) -> Rows:
    return lambda first, last: tensor[first:last].detach().to(dtype).contiguous()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _name(name: str, tensor: Tensor, dtype: torch.dtype) -> str:
    found = dtype if tensor.is_floating_point() else tensor.dtype
    if found not in _NAMES:
        raise ValueError(f"tensor {name} is {found}, which has no name in safetensors")
    return _NAMES[found]

"""Exports that a trainer has converted: held against the plan, and looked through for what is no number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from syncline.contract.artefact import Part, parts
from syncline.contract.plan import PrecisionPlan
from syncline.sync.export import BadExport, Fact, NonFinite, RawTensor
from syncline.sync.values import CHUNK, KEPT


def check_facts(plan: PrecisionPlan, facts: Mapping[str, Fact]) -> None:
    """Raise `BadExport` naming a tensor that is missing, unexpected, or of another dtype or shape than `plan` says."""
    wanted = {part.name: Fact(part.dtype, part.shape) for entry in plan.low_bit() for part in parts(entry)}
    for entry in plan.entries:
        if entry.weight is None:
            found = facts.get(entry.name)
            dtype = found.dtype if found is not None and found.dtype in KEPT else "BF16"
            wanted[entry.name] = Fact(dtype, entry.shape)
    for name in sorted(wanted.keys() | facts.keys()):
        if name not in facts:
            raise BadExport(f"tensor {name} is missing from a converted export")
        if name not in wanted:
            raise BadExport(f"tensor {name} is not one that the plan makes")
        if facts[name] != wanted[name]:
            one, other = facts[name], wanted[name]
            raise BadExport(
                f"tensor {name} is {one.dtype} {list(one.shape)}, the plan makes it {other.dtype} {list(other.shape)}"
            )


def check_part(tensor: RawTensor, part: Part, shape: tuple[int, ...]) -> None:
    """Raise `NonFinite` for a code or scale that stands for no number, `BadExport` for a shape that is not `shape`."""
    if part.role == "shape":
        if tuple(tensor.data.view("<i8")) != shape:
            raise BadExport(
                f"tensor {tensor.name} says {tensor.data.view('<i8').tolist()}, it is {list(shape)}"
            )
        return
    for start in range(0, tensor.data.nbytes, 4 * CHUNK):
        wrong = _no_numbers(tensor.data[start : start + 4 * CHUNK], part)
        if wrong is not None and wrong.any():
            index = start // (4 if part.dtype == "F32" else 1) + int(wrong.argmax())
            raise NonFinite(
                f"tensor {tensor.name} is no number at flat index {index} of {list(tensor.shape)}"
            )


def _no_numbers(data: Any, part: Part) -> Any:
    """Where `data` of `part` is NaN or infinite; None: its format has no such values."""
    match part.dtype:
        case "F8_E4M3":
            return (data & 0x7F) == 0x7F
        case "F32":
            return ~np.isfinite(data.view("<f4"))
        case "U8" if part.role == "scale":  # E8M0
            return data == 0xFF
    return None

"""Low-bit weights of a version as the values that they stand for: what the trainer's forward multiplied.

They are held as the trainer holds its operands (`trainer.operands`): FP32, or rounded once to BF16. FP32 values that
are BF16 values anyway, as under scales that are powers of two, are written as BF16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from syncline.contract.artefact import Part, parts
from syncline.contract.plan import PlanEntry, PrecisionPlan
from syncline.contract.schemes import Scheme
from syncline.contract.version_path import TensorEntry
from syncline.exporting.held import CannotExport
from syncline.exporting.source import Buffer, Fact, blob
from syncline.numerics.quantized import Quantized, dequantize
from syncline.runtime.store import BlobStore

_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}


class Decoded:
    """The tensors of a manifest under `plan`, low-bit ones dequantised under the name of the weight.

    operands   "bf16" or "fp32": how the trainer holds them
    """

    def __init__(
        self, store: BlobStore, entries: Mapping[str, TensorEntry], plan: PrecisionPlan, operands: str
    ) -> None:
        self._store, self._entries = store, dict(entries)
        self._low = {entry.name: entry for entry in plan.low_bit()}
        self._operands = operands
        made = {part.name for entry in self._low.values() for part in parts(entry)}
        self._facts = {
            n: Fact(e.dtype, tuple(e.shape), e.digest) for n, e in entries.items() if n not in made
        }
        self._facts |= {name: Fact(self._held(e), tuple(e.shape)) for name, e in self._low.items()}

    @property
    def facts(self) -> Mapping[str, Fact]:
        """What each tensor is."""
        return self._facts

    @property
    def widest(self) -> str:
        """ "F32" if one of the tensors needs it, else "BF16"."""
        return "F32" if any(fact.dtype == "F32" for fact in self._facts.values()) else "BF16"

    def tensors(self, names: list[str]) -> Iterator[tuple[str, Buffer]]:
        """Wide tensors as they are stored, the others dequantised. Raises `CannotExport` naming the tensor."""
        for name in names:
            if name in self._low:
                yield name, self._values(self._low[name])
            else:
                yield name, blob(self._store, self._entries[name])

    def _held(self, entry: PlanEntry) -> str:
        exact = entry.weight is not None and _power_of_two(entry.weight)
        return "BF16" if exact or self._operands == "bf16" else "F32"

    def _values(self, entry: PlanEntry) -> memoryview:
        assert entry.weight is not None
        held = {part.role: self._part(part) for part in parts(entry) if part.role != "shape"}
        quantized = Quantized(
            entry.weight, held["codes"], held["scale"], held.get("outer"), tuple(entry.shape)
        )
        values = dequantize(quantized)
        if self._held(entry) == "BF16":
            rounded = values.bfloat16()
            if self._operands == "fp32" and not torch.equal(rounded.float(), values):
                raise CannotExport(
                    f"tensor {entry.name}: its values are no BF16 values, though scales are 2^n"
                )
            values = rounded
        return _raw(values)

    def _part(self, part: Part) -> Tensor:
        raw = blob(self._store, self._entries[part.name], checked=True)
        return torch.frombuffer(raw, dtype=_DTYPES[part.dtype]).reshape(part.shape)


def _power_of_two(scheme: Scheme) -> bool:
    """Whether every scale of `scheme` is one, so that few-bit elements times it are BF16 values."""
    return scheme.format in ("mxfp8", "mxfp4") or (scheme.format == "fp8_block" and scheme.rule == "pow2")


def _raw(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return view

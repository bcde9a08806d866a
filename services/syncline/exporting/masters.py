"""The tensors of a trainer's checkpoint under their checkpoint names, as the trainer's model holds them.

A checkpoint keeps FP32 masters under the names and in the layout of the model in memory. Under trainer parameters
`bf16` the model holds them rounded to BF16 (nearest even), and so do these tensors; under `fp32` as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from syncline.contract.adapters import DOWN, UP
from syncline.contract.precision import PrecisionContract
from syncline.exporting.held import CannotExport, read_checkpoint
from syncline.exporting.source import Buffer, Fact
from syncline.reference.model import empty_model, model_folder, state_plan

WEIGHTS = "weights.safetensors"  # as the torch engine names it
_PARAMETER, _BUFFER = "parameter.", "buffer."
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}


class Masters:
    """The weights in the checkpoint at `path`. Raises `CannotExport`, also for bytes that are not those saved."""

    def __init__(self, path: Path, contract: PrecisionContract, models: Path, model: str) -> None:
        _check(path, contract)
        self._file = _opened(path / WEIGHTS)
        stored = set(self._file.keys())
        self._dtype = torch.bfloat16 if contract.trainer.parameters == "bf16" else torch.float32
        self._whole: tuple[str, Tensor] | None = None  # the tensor in memory that was read last
        if contract.adapter is not None:
            owners = sorted(n for n in stored if n.endswith((f".{DOWN}", f".{UP}")))
            self._owner = {n.removeprefix(_PARAMETER) + ".weight": n for n in owners}
            self._windows: dict[str, Any] = dict.fromkeys(self._owner)
        else:
            plan = state_plan(empty_model(model_folder(models, model)))
            self._windows = dict(plan.windows)
            self._owner = {name: _stored(w.owner, stored) for name, w in plan.windows.items()}
        self._facts = {name: self._fact(name) for name in self._owner}

    @property
    def facts(self) -> Mapping[str, Fact]:
        """What each tensor is."""
        return self._facts

    def tensors(self, names: list[str]) -> Iterator[tuple[str, Buffer]]:
        """Bytes of `names`, those that lie in one tensor of the model together."""
        for name in sorted(names, key=lambda name: (self._owner[name], name)):
            yield name, _raw(self._read(name))

    def _read(self, name: str) -> Tensor:
        owner, window = self._owner[name], self._windows[name]
        if self._whole is None or self._whole[0] != owner:
            self._whole = None
            self._whole = owner, self._file.get_tensor(owner)
        tensor = self._whole[1]
        if window is not None:
            tensor = torch.as_strided(tensor, window.shape, window.stride, window.offset)
        if not tensor.is_floating_point():
            return tensor
        if not bool(tensor.isfinite().all()):
            raise CannotExport(f"tensor {name} is not finite")
        return tensor.to(self._dtype)

    def _fact(self, name: str) -> Fact:
        held = self._file.get_slice(self._owner[name])
        window = self._windows[name]
        shape = tuple(held.get_shape()) if window is None else tuple(window.shape)
        dtype = str(held.get_dtype())
        return Fact(_NAMES[self._dtype] if dtype.startswith(("F", "BF")) else dtype, shape)


def _check(path: Path, contract: PrecisionContract) -> None:
    saved = read_checkpoint(path)
    if saved.engine != "torch":
        raise CannotExport(f"{path.name} is of the engine {saved.engine}, whose checkpoints are not exported")
    if saved.contract != contract.digest():
        raise CannotExport(f"{path.name} is of contract {saved.contract}, the job's is {contract.digest()}")
    if contract.trainer.gather == "fp8_block":
        raise CannotExport(
            "trainer.gather 'fp8_block': the trainer's model does not hold its masters' values"
        )
    with (path / WEIGHTS).open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != saved.files.get(WEIGHTS):
            raise CannotExport(f"{path.name}: {WEIGHTS} is not the file that was saved")


def _opened(path: Path) -> Any:
    """The library's reader, of which nothing is typed."""
    return safe_open(path, "pt")


def _stored(owner: str, stored: set[str]) -> str:
    for prefix in (_PARAMETER, _BUFFER):
        if prefix + owner in stored:
            return prefix + owner
    raise CannotExport(f"the checkpoint has no tensor {owner}")


def _raw(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return view

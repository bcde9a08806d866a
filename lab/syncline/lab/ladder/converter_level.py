"""Level 2: quantizer and converter. What lies in the store is, byte for byte, what the oracle makes of the masters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from syncline.contract.artefact import parts
from syncline.contract.plan import PlanEntry
from syncline.contract.version_path import TensorEntry
from syncline.lab.ladder.oracle import encoded
from syncline.lab.ladder.records import Check, same
from syncline.lab.ladder.subject import Subject

ORACLE = "lab/ladder/oracle.py, from the definitions of the formats"


def checks(subject: Subject) -> Iterator[Check]:
    """Tensors of the version that serves, against the trainer's masters."""
    masters = subject.masters()
    wide = {name: values.numpy() for name, values in subject.wide(masters).items()}
    entries = {entry.name: entry for entry in _base(subject)}
    bridged = subject.contract.convert.where == "rollout_worker"
    low = [entry for entry in subject.plan.low_bit() if not bridged]
    quantised = {part.name for entry in low for part in parts(entry)}
    expected = quantised | {entry.name for entry in subject.plan.entries if entry not in low}
    yield same(
        "tensor names", sorted(entries.keys() ^ expected), "contract/artefact.py, as SGLang loads them"
    )
    yield same("codes, scales, grouping, padding, packing", _low_bit(subject, wide, low, entries), ORACLE)
    yield same("wide tensors", _wide(subject, wide, entries, quantised), "BF16, rounded once to nearest even")
    if subject.contract.adapter is not None:
        yield same("adapter tensors", _adapter(subject, masters), "the trainer's masters, in BF16")


def _base(subject: Subject) -> tuple[TensorEntry, ...]:
    """The version's tensors without an adapter's."""
    targets = _adapter_names(subject)
    return tuple(entry for entry in subject.manifest.tensors if entry.name not in targets)


def _low_bit(
    subject: Subject,
    wide: Mapping[str, NDArray[np.float32]],
    low: list[PlanEntry],
    entries: Mapping[str, TensorEntry],
) -> list[str]:
    shared: dict[str, float] = {}
    rounded = subject.contract.trainer.parameters == "bf16"
    values = {entry.name: _bf16(wide[entry.name]) if rounded else wide[entry.name] for entry in low}
    for entry in low:
        most = float(np.abs(values[entry.name]).max())
        shared[_sharing(entry)] = max(shared.get(_sharing(entry), 0.0), most)
    wrong = []
    for entry in low:
        assert entry.weight is not None
        amax = shared[_sharing(entry)] if entry.weight.format == "nvfp4" else None
        made = encoded(values[entry.name], entry.weight, amax)
        for part in parts(entry):
            found = entries.get(part.name)
            if found is None or (found.dtype, found.shape) != (part.dtype, part.shape):
                wrong.append(f"{part.name}: {'absent' if found is None else (found.dtype, found.shape)}")
            elif subject.blob(found.digest) != made[part.role]:
                wrong.append(f"{part.name}: {part.role}{_first(subject, found, made[part.role])}")
    return wrong


def _sharing(entry: PlanEntry) -> str:
    """Which tensors have one outer scale: those of a fused group, or this one alone."""
    return entry.outer or entry.name


def _first(subject: Subject, found: TensorEntry, made: bytes) -> str:
    ours = np.frombuffer(subject.blob(found.digest), np.uint8)
    theirs = np.frombuffer(made, np.uint8)
    if ours.shape != theirs.shape:
        return f" has {len(ours)} bytes for {len(theirs)}"
    unequal = np.flatnonzero(ours != theirs)
    return f" differs at byte {unequal[0]}, and at {len(unequal)} of {len(ours)}"


def _wide(
    subject: Subject,
    wide: Mapping[str, NDArray[np.float32]],
    entries: Mapping[str, TensorEntry],
    quantised: set[str],
) -> list[str]:
    return [
        name
        for name, entry in entries.items()
        if name not in quantised
        and (name not in wide or not _is_rounded(subject.blob(entry.digest), entry, wide[name]))
    ]


def _is_rounded(found: bytes, entry: TensorEntry, master: NDArray[np.float32]) -> bool:
    if entry.dtype != "BF16" or entry.shape != master.shape:
        return False
    return np.array_equal(np.frombuffer(found, np.uint16), _bf16_bits(master).reshape(-1))


def _bf16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each value, rounded half to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _bf16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return (_bf16_bits(x).astype(np.uint32) << 16).view(np.float32)


# ---- adapters -------------------------------------------------------------------------------------------------
def _adapter_names(subject: Subject) -> set[str]:
    return {entry.name for entry in subject.manifest.tensors if ".lora_" in entry.name}


def _adapter(subject: Subject, every: Mapping[str, Tensor]) -> list[str]:
    """A and B of each target. Masters are named after the module, checkpoint tensors as PEFT names them."""
    masters = {n: t for n, t in every.items() if ".lora_" in n}
    entries = {entry.name: entry for entry in subject.manifest.tensors if ".lora_" in entry.name}
    owners = {_plain(name): name for name in masters}
    wrong = sorted({_plain(name) for name in entries} ^ owners.keys())
    for name, entry in entries.items():
        owner = owners.get(_plain(name))
        if owner is not None:
            values = masters[owner].to(torch.float32).numpy()
            if not _is_rounded(subject.blob(entry.digest), entry, values):
                wrong.append(name)
    return wrong


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").removesuffix(".weight")

"""Faults of what the trainer hands over: tensors before they are stamped, files after."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from fault_stack import Change, Damage, Stack
from fault_weights import Tensors
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from syncline.contract.streams import MINTED
from syncline.contract.version_path import VersionId

OTHER = "model.layers.0.self_attn.q_proj.weight"
TENSOR = "model.layers.1.self_attn.o_proj.weight"
RENAMED = "model.layers.1.self_attn.out_proj.weight"
EXTRA = "model.layers.2.self_attn.o_proj.weight"
A = "model.layers.0.self_attn.q_proj.lora_A.weight"
A_OTHER = "model.layers.1.self_attn.q_proj.lora_A.weight"
B = "model.layers.0.self_attn.q_proj.lora_B.weight"
SAVED = "lm_head.modules_to_save.weight"
A_EXTRA = "model.layers.0.mlp.up_proj.lora_A.weight"
FILE = "model.safetensors"

Injection = Callable[[Stack], AbstractContextManager[None]]


def _changed(change: Change) -> Injection:
    @contextmanager
    def inject(stack: Stack) -> Iterator[None]:
        stack.mint(change)
        yield

    return inject


def _late(late: Damage) -> Injection:
    @contextmanager
    def inject(stack: Stack) -> Iterator[None]:
        stack.mint(late=late)
        yield

    return inject


def _set(tensors: Tensors, name: str, source: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors[name] = change(tensors[source].clone())


def _exchange(tensors: Tensors, one: str, other: str) -> None:
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[7] = torch.nan
    return tensor


missing = _changed(lambda t: t.pop(TENSOR))
renamed = _changed(lambda t: t.update({RENAMED: t.pop(TENSOR)}))
extra = _changed(lambda t: _set(t, EXTRA, TENSOR, lambda x: x))
reshaped = _changed(lambda t: _set(t, TENSOR, TENSOR, lambda x: x.reshape(32, 128)))
not_finite = _changed(lambda t: _set(t, TENSOR, TENSOR, _nan))
exchanged = _changed(lambda t: _exchange(t, TENSOR, OTHER))
adapter_missing = _changed(lambda t: t.pop(A))
adapter_extra = _changed(lambda t: _set(t, A_EXTRA, A, lambda x: x))
adapter_rank = _changed(lambda t: _set(t, A, A, lambda x: torch.cat([x, x])))
adapter_nan = _changed(lambda t: _set(t, A, A, _nan))
adapter_exchanged = _changed(lambda t: _exchange(t, A, A_OTHER))
adapter_base = _changed(lambda t: t.update({TENSOR: torch.zeros(64, 64, dtype=torch.bfloat16)}))


adapter_saved = _changed(lambda t: t.update({SAVED: torch.zeros(100, 64, dtype=torch.bfloat16)}))
adapter_half = _changed(lambda t: t.pop(B))


@contextmanager
def adapter_no_base(stack: Stack) -> Iterator[None]:
    stack.mint(base=VersionId(7, 7))
    yield


@contextmanager
def in_two_files(stack: Stack) -> Iterator[None]:
    def split(tensors: Tensors) -> Mapping[str, Tensors]:
        return {"a.safetensors": tensors, "b.safetensors": {TENSOR: tensors[TENSOR] + 1}}

    stack.mint(split=split)
    yield


@contextmanager
def twice_in_a_file(stack: Stack) -> Iterator[None]:
    stack.mint(damage=lambda folder: _listed_twice(folder / FILE))
    yield


def _listed_twice(path: Path) -> None:
    """The header's first entry again, over other bytes at the end."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + size].decode().rstrip(), raw[8 + size :]
    entry = json.loads(header)[TENSOR]
    start, stop = entry["data_offsets"]
    again = entry | {"data_offsets": [len(data), len(data) + stop - start]}
    text = f'{header[:-1]},"{TENSOR}":{json.dumps(again)}}}'
    text += " " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data + bytes(stop - start))


def _truncate(folder: Path) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path, at: int = -5) -> None:
    """One bit of a file, in place."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(raw)


def _replace(folder: Path) -> None:
    """Another file of the same names, shapes and size."""
    tensors = {name: torch.roll(tensor, 1) for name, tensor in load_file(folder / FILE).items()}
    save_file(tensors, folder / "new")
    (folder / "new").rename(folder / FILE)


truncated = _late(_truncate)
flipped = _late(lambda folder: flip(folder / FILE))
replaced = _late(_replace)
deleted = _late(lambda folder: (folder / FILE).unlink())
unstamped = _late(lambda folder: (folder / "extra.safetensors").write_bytes((folder / FILE).read_bytes()))


@contextmanager
def renamed_over_late(stack: Stack) -> Iterator[None]:
    stack.hooks.half_converted = _replace
    stack.mint()
    yield
    stack.hooks.half_converted = None


@contextmanager
def minted_twice(stack: Stack) -> Iterator[None]:
    version = stack.mint()
    stack.settle(version)
    assert stack.minted is not None
    manifest = stack.store.read_manifest(version)
    again = {name: "0" * 64 for name in stack.minted.files}
    stack.bus.append(MINTED.at(stack.job), replace(stack.minted, files=again))
    yield
    stack.settle(stack.mint())
    assert stack.store.read_manifest(version) == manifest


@contextmanager
def overwritten_late(stack: Stack) -> Iterator[None]:
    stack.hooks.half_converted = lambda folder: flip(folder / FILE, -6)
    stack.mint()
    yield
    stack.hooks.half_converted = None

"""Faults behind conversion: in the manifest, in the store, in one worker's buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from fault_exports import EXTRA, RENAMED, TENSOR, A, flip
from fault_stack import SECONDS, Stack
from msgspec.structs import replace
from torch import Tensor
from waiting import wait_until

from syncline.contract.version_path import TensorEntry, VersionId, VersionManifest, opened, sign

GATE = "model.layers.0.mlp.gate_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
KEY = b"a key of this job"

Injection = Callable[[Stack], AbstractContextManager[None]]

# ---- the manifest, unsigned
Rewrite = Callable[[list[TensorEntry]], list[TensorEntry]]


def _rewritten(change: Rewrite) -> Injection:
    """The manifest with other entries: what a wrong converter would have signed."""

    def rewrite(manifest: VersionManifest) -> VersionManifest:
        entries = change(list(manifest.tensors))
        return replace(manifest, tensors=tuple(sorted(entries, key=lambda entry: entry.name)))

    @contextmanager
    def inject(stack: Stack) -> Iterator[None]:
        stack.hooks.before_sign = rewrite
        stack.mint()
        yield
        stack.hooks.before_sign = None

    return inject


def without(suffix: str) -> Injection:
    return _rewritten(lambda entries: [entry for entry in entries if entry.name != TENSOR + suffix])


def _with(at: str, /, **changes: Any) -> Injection:
    return _rewritten(lambda entries: [replace(e, **changes) if e.name == at else e for e in entries])


renamed = _with(TENSOR, name=RENAMED)
reshaped = _with(TENSOR, shape=(32, 128))
reshaped_scale = _with(f"{TENSOR}_scale", shape=(128, 1))
extra = _rewritten(lambda entries: [*entries, *(replace(e, name=EXTRA) for e in entries if e.name == TENSOR)])
listed_twice = _rewritten(
    lambda entries: [
        *entries,
        *(replace(e, digest=_other(entries).digest) for e in entries if e.name == TENSOR),
    ]
)


def _other(entries: list[TensorEntry]) -> TensorEntry:
    """A tensor of the shape of TENSOR."""
    return next(e for e in entries if e.name == TENSOR.replace("layers.1", "layers.0"))


@contextmanager
def stale_scale(stack: Stack) -> Iterator[None]:
    """New codes beside the scale of the version before, whose blob is still there."""
    before = _manifest(stack, stack.served)
    old = next(entry for entry in before.tensors if entry.name == f"{TENSOR}_scale")
    with _with(old.name, digest=old.digest)(stack):
        yield


def _manifest(stack: Stack, number: int) -> VersionManifest:
    return opened(stack.store.read_manifest(VersionId(0, number)), KEY)


# ---- the store, before anybody is told to stage
def _in_store(damage: Callable[[Stack, VersionManifest], object]) -> Injection:
    @contextmanager
    def inject(stack: Stack) -> Iterator[None]:
        stack.hooks.after_publish = lambda manifest: damage(stack, manifest)
        stack.mint()
        yield
        stack.hooks.after_publish = None

    return inject


def _blob(name: str, damage: Callable[[Path], object]) -> Injection:
    def find(stack: Stack, manifest: VersionManifest) -> None:
        entry = next(entry for entry in manifest.tensors if entry.name == name)
        damage(stack.store.path(entry.digest))

    return _in_store(find)


def _truncate(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-4])


def _replace(path: Path) -> None:
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw[::-1])


def _unreadable(path: Path) -> None:
    """A folder in its place: opening it is an error of the system, as on a broken disk."""
    path.unlink()
    path.mkdir()


CODES = f"{TENSOR}_packed"
blob_truncated = _blob(CODES, _truncate)
blob_flipped = _blob(CODES, flip)
blob_replaced = _blob(CODES, _replace)
blob_gone = _blob(CODES, lambda path: path.unlink())
adapter_flipped = _blob(A, flip)


def _until_mended(inject: Injection, folder: str) -> Injection:
    """The folder that stands for a file is gone before the next version."""

    @contextmanager
    def injected(stack: Stack) -> Iterator[None]:
        with inject(stack):
            yield
            for path in (stack.run / "store" / folder).iterdir():
                if path.is_dir():
                    path.rmdir()

    return injected


blob_unreadable = _until_mended(_blob(CODES, _unreadable), "blobs")


@contextmanager
def blob_flipped_and_kept(stack: Stack) -> Iterator[None]:
    """The version that follows has the same weights."""
    with _blob(TENSOR, flip)(stack):
        yield
        stack.repeat()


def _rewrite_manifest(change: Callable[[Stack, VersionManifest, Path], object]) -> Injection:
    def write(stack: Stack, manifest: VersionManifest) -> None:
        path = stack.run / "store" / "manifests" / f"{manifest.version}.json"
        path.chmod(0o644)
        change(stack, manifest, path)

    return _in_store(write)


def _sign(path: Path, manifest: VersionManifest, key: bytes) -> None:
    path.write_bytes(msgspec.json.encode(sign(manifest, key)))


foreign_manifest = _rewrite_manifest(lambda _, manifest, path: _sign(path, manifest, b"another key"))
older_manifest = _rewrite_manifest(lambda s, _, path: _sign(path, _manifest(s, s.served), KEY))
other_manifest = _rewrite_manifest(
    lambda _, manifest, path: _sign(path, replace(manifest, optimizer_step=manifest.optimizer_step + 1), KEY)
)
garbage_manifest = _rewrite_manifest(lambda _, __, path: path.write_bytes(b"{"))
unreadable_manifest = _until_mended(_rewrite_manifest(lambda _, __, path: _unreadable(path)), "manifests")
no_manifest = _rewrite_manifest(lambda _, __, path: path.unlink())


@contextmanager
def base_gone(stack: Stack) -> Iterator[None]:
    """A blob that every version of the adapter names, and that no export brings again."""
    base = _manifest(stack, 0)
    entry = next(entry for entry in base.tensors if entry.name == f"{GATE}_packed")
    stack.store.path(entry.digest).unlink()
    stack.mint()
    yield
    stack.settle(stack.mint(whole=True))


@contextmanager
def base_flipped(stack: Stack) -> Iterator[None]:
    """The same blob damaged: nobody reads it but a worker that is new."""
    name = f"{GATE}_packed"
    entry = next(entry for entry in _manifest(stack, stack.served).tensors if entry.name == name)
    flip(stack.store.path(entry.digest))
    version = stack.mint()
    with stack.newcomer("late"):
        refused = f"tensor {name}: blob"
        wait_until(lambda: refused in stack.reason(version, "late"), SECONDS, "the new worker refuses")
        assert stack.serves("late") is None
    yield
    stack.settle(stack.mint(whole=True))


# ---- one worker's buffer
ONE = "w1"


def _wrong(entry: TensorEntry, tensor: Tensor) -> Tensor:
    if entry.name != f"{TENSOR}_scale":
        return tensor
    tensor = tensor.clone()
    tensor.view(-1)[0] *= 2
    return tensor


@contextmanager
def copied_wrongly(stack: Stack) -> Iterator[None]:
    stack.hooks.on_read[ONE] = _wrong
    stack.mint()
    yield
    stack.hooks.on_read.clear()


@contextmanager
def disk_error(stack: Stack) -> Iterator[None]:
    """The read of one blob fails on one worker alone."""
    with stack.failing_reads(ONE, CODES):
        stack.mint()
        yield


@contextmanager
def changed_later(stack: Stack) -> Iterator[None]:
    """Weights that were read back and are changed before they are scored."""

    def damage(weights: Any) -> None:
        with torch.no_grad():
            weights.packed.views[NORM].mul_(1.5)

    stack.hooks.after_stage[ONE] = damage
    stack.mint()
    yield
    stack.hooks.after_stage.clear()


@contextmanager
def stale_derived_scale(stack: Stack) -> Iterator[None]:
    """The engine quantises BF16 itself, and one scale stays what it was for the weights before."""
    scale = f"{DOWN}_scale"
    packed: Any = None

    def keep() -> None:
        nonlocal packed
        engine: Any = stack.parts[ONE].engine
        weights = engine._staged or engine._spare
        assert weights is not None, "no buffer was used before"
        packed = weights.packed
        quantise = packed.quantise

        def stale(planned: Any, wide: Tensor, outer: Tensor | None) -> Any:
            before = packed.slots[scale].clone()
            written = quantise(planned, wide, outer)
            if planned.name == DOWN:
                written = {name: made.clone() for name, made in written.items()}
                packed.slots[scale].copy_(before)
            return written

        packed.quantise = stale

    stack.hooks.before_stage[ONE] = keep
    stack.mint()
    yield
    stack.hooks.before_stage.clear()
    del packed.quantise


@contextmanager
def base_damaged(stack: Stack) -> Iterator[None]:
    """The base is held and not copied again: one bit of its codes changes in the buffer that is loaded next."""

    def damage() -> None:
        engine: Any = stack.parts[ONE].engine
        slot = engine._spare.packed.slots[f"{GATE}_packed"]
        slot.view(-1)[3] ^= 1

    stack.hooks.before_stage[ONE] = damage
    stack.mint()
    yield
    stack.hooks.before_stage.clear()


@contextmanager
def hangs(stack: Stack) -> Iterator[None]:
    with stack.held_before_stage(ONE) as held:
        stack.mint()
        held()
        yield


@contextmanager
def all_hang(stack: Stack) -> Iterator[None]:
    with stack.held_before_stage(*stack.kind.workers) as held:
        stack.mint()
        held()
        yield

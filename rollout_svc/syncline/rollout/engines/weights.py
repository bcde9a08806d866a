"""One set of weights: a model whose every tensor was read from blobs, read back, and compared with its
manifest.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from threading import Lock

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from syncline.contract.artefact import parts
from syncline.contract.plan import PlanEntry
from syncline.contract.version_path import (
    SignedManifest,
    TensorEntry,
    VersionId,
    VersionManifest,
    loaded_digest,
)
from syncline.numerics.quantized import NotQuantizable, outer_scale
from syncline.reference.adapter import Adapters, attach
from syncline.reference.model import empty_model
from syncline.reference.packed import DTYPES, pack
from syncline.reference.routes import RouteTap
from syncline.reference.state import compute_in_bf16
from syncline.rollout.engine import StageFailed
from syncline.rollout.engines.direct import Direct, direct_of
from syncline.rollout.engines.expected import Expected
from syncline.rollout.engines.readback import BlobChanged, Scratch, digest_of, fill
from syncline.runtime.store import BadBlob, BlobStore, MissingBlob

LOADERS = 4  # so many threads fill the memory's bandwidth


class Weights:
    """A model and the version that its tensors are. `version` is None while a load is under way or failed.

    Low-bit weights lie in few bits alone (`reference/packed.py`), wide ones with BF16 values in the contract's
    compute dtype. A tensor whose
    digest the buffer holds already is not copied again: what is held is hashed, and stands if it is that digest.
    """

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        architecture = empty_model(expected.folder)
        if expected.contract.compute == "bf16":
            compute_in_bf16(architecture)
        # low-bit weights and adapters are multiplied by modules of their own
        whole = not expected.plan.low_bit() and expected.contract.adapter is None
        self.direct: Direct | None = direct_of(architecture) if whole else None
        self.packed = pack(architecture, expected.state, expected.plan, expected.contract)
        self.model: PreTrainedModel = self.packed.model
        self.adapters: Adapters | None = None
        if expected.contract.adapter is not None:
            # what A is made of does not matter: a version brings it
            self.adapters = attach(self.model, expected.state, expected.contract.adapter, seed=0)
            self.packed.views |= self.adapters.views()
        self.model.requires_grad_(False)
        self.taps = RouteTap(self.model)
        self.version: VersionId | None = None
        self.digest = ""
        self.signed: SignedManifest | None = None
        self.manifest: VersionManifest | None = None
        self.contents: dict[str, str] = {}  # tensor name -> digest, as read back
        self.copied = 0  # bytes that the last load wrote
        self._counting = Lock()
        self._held: dict[str, str] = {}  # tensor name -> what was written there last, verified
        self._quantised: dict[
            str, str
        ] = {}  # weight -> blob and outer scale that its codes were made of here
        self._ties = dict(expected.state.ties)

    @property
    def adapter(self) -> str | None:
        """Versioned name of the adapter, for spans; None: the contract has none, or nothing is loaded."""
        if self.adapters is None or self.version is None:
            return None
        return f"{self.expected.contract.name}@{self.version}"

    def load(
        self, signed: SignedManifest, manifest: VersionManifest, store: BlobStore, threads: int = 1
    ) -> str:
        """Write every tensor of `manifest`, read each back as the forward pass will; returns the loaded
        digest.

        See `version_path.loaded_digest`: each tensor's digest is taken from what was read back, which proves the blob
        too. A weight that the engine quantises itself (route `bf16_bridge`) has the digest of the BF16 blob that its
        codes were made from; its codes are compared with a second quantisation of that blob. `threads` copy and hash,
        the caller's among them. Raises `StageFailed` naming the tensor; nothing is written after that.
        """
        self.version, self.signed, self.digest, self.contents = None, None, "", {}
        self.manifest, self.copied = None, 0
        bridged = self.expected.bridged
        outer = dict(self._outer_scales(manifest, store)) if bridged else {}
        found: dict[str, str] = {}
        own = [entry for entry in manifest.tensors if entry.name not in bridged and not self._is_tied(entry)]
        # the largest first: what is left for the end is small, and no thread waits long for the last one
        work = deque(sorted(own, key=lambda entry: -entry.nbytes))
        with ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="blob") as pool:
            try:
                beside = [pool.submit(self._bring, work, store, found) for _ in range(threads - 1)]
                with torch.no_grad():  # a matter of each thread
                    for entry in manifest.tensors:
                        if entry.name in bridged:
                            planned, scale = bridged[entry.name], outer.get(entry.name)
                            found[entry.name] = self._quantise(entry, planned, scale, store)
                self._bring(work, store, found)
                for other in beside:
                    other.result()
            finally:
                work.clear()
        for entry in manifest.tensors:
            if entry.name not in found:  # tied, and carried none the less: only compared
                found[entry.name] = self._checked(entry, digest_of(self._own(entry), DTYPES[entry.dtype]))
        read_back = [msgspec.structs.replace(entry, digest=found[entry.name]) for entry in manifest.tensors]
        self.version, self.digest, self.signed = manifest.version, manifest.digest(), signed
        self.manifest = manifest
        self.contents = found
        return loaded_digest(read_back)

    def _is_tied(self, entry: TensorEntry) -> bool:
        return entry.name not in self.packed.slots and entry.name not in self.packed.views

    def _own(self, entry: TensorEntry) -> Tensor:
        """Where a tensor of the manifest lies."""
        slot = self.packed.slots.get(entry.name)
        return self.packed.views[self._ties.get(entry.name, entry.name)] if slot is None else slot

    def _bring(self, work: deque[TensorEntry], store: BlobStore, digests: dict[str, str]) -> None:
        """Bring tensors of `work` where they belong until none is left, in this thread. What it finds wrong ends the
        work of all.
        """
        scratch, done = Scratch(), False
        try:
            while work:
                try:
                    entry = work.popleft()
                except IndexError:  # another thread was quicker
                    break
                digests[entry.name] = self._settle(entry, store, scratch)
            done = True
        finally:
            if not done:
                work.clear()

    def _settle(self, entry: TensorEntry, store: BlobStore, scratch: Scratch) -> str:
        """Have the buffer hold one tensor: the digest of what can be read there. Raises `StageFailed` if it is
        another's.
        """
        own = self._own(entry)
        if self._held.pop(entry.name, None) == entry.digest:
            found = digest_of(own, DTYPES[entry.dtype])
            if found == entry.digest:
                self._held[entry.name] = found
                return found
        found = _poured(entry, own, store, scratch)
        if found != entry.digest:
            _proven(entry, store)  # is it the blob, or what was made of it?
        self._held[entry.name] = self._checked(entry, found)
        with self._counting:
            self.copied += entry.nbytes
        return found

    def _checked(self, entry: TensorEntry, found: str) -> str:
        if found != entry.digest:
            raise StageFailed(
                f"tensor {entry.name} reads back with digest {found}, the manifest says {entry.digest}"
            )
        return found

    # ---- route bf16_bridge
    def _outer_scales(self, manifest: VersionManifest, store: BlobStore) -> Iterator[tuple[str, Tensor]]:
        """Outer scales of nvfp4 weights, shared where the plan says so."""
        groups: dict[str, list[TensorEntry]] = {}
        for entry in manifest.tensors:
            planned = self.expected.bridged.get(entry.name)
            if planned is not None and planned.weight is not None and planned.weight.format == "nvfp4":
                groups.setdefault(planned.outer or planned.name, []).append(entry)
        for members in groups.values():
            largest = [_proven(entry, store).abs().amax().float() for entry in members]
            for entry in members:
                scheme = self.expected.bridged[entry.name].weight
                if scheme is not None:
                    yield entry.name, outer_scale([torch.stack(largest)], scheme)

    def _quantise(
        self, entry: TensorEntry, planned: PlanEntry, outer: Tensor | None, store: BlobStore
    ) -> str:
        made_of = entry.digest if outer is None else f"{entry.digest} under {float(outer).hex()}"
        names = [part.name for part in parts(planned)]
        if self._quantised.get(entry.name) == made_of and all(
            self._held.get(name) == _held_digest(self.packed.slots[name]) for name in names
        ):
            return entry.digest
        self._quantised.pop(entry.name, None)
        wide = _proven(entry, store)
        try:
            written = self.packed.quantise(planned, wide, outer)
        except NotQuantizable as error:
            raise StageFailed(str(error)) from None
        for name, made in written.items():
            held = _held_digest(self.packed.slots[name])
            if held != _held_digest(made):
                raise StageFailed(f"tensor {name} does not read back as {entry.name} was quantised")
            self._held[name] = held
        self._quantised[entry.name] = made_of
        self.copied += entry.nbytes
        return entry.digest


def _poured(entry: TensorEntry, own: Tensor, store: BlobStore, scratch: Scratch) -> str:
    """Write the blob to `own`: the digest of what can be read there then. Its bytes are not checked before."""
    if not own.is_contiguous():
        return fill(own, _tensor(entry, store))
    try:
        blob = store.descriptor(entry.digest)
    except (MissingBlob, OSError) as error:
        raise StageFailed(f"tensor {entry.name}: {error}") from None
    try:
        if os.fstat(blob).st_size == _size(entry) == own.numel() * DTYPES[entry.dtype].itemsize:
            return scratch.pour(own, blob, DTYPES[entry.dtype])
    except (BlobChanged, OSError) as error:
        raise StageFailed(f"tensor {entry.name}: {error}") from None
    finally:
        os.close(blob)
    _proven(entry, store)  # a damaged blob is called that
    raise StageFailed(f"tensor {entry.name} has shape {list(entry.shape)}, the engine's {list(own.shape)}")


def _tensor(entry: TensorEntry, store: BlobStore) -> Tensor:
    """The blob as a tensor (memory-mapped if large). Its bytes are not checked, but that they are as many as they
    should be.
    """
    try:
        raw = store.mapped(entry.digest)
        if raw.nbytes != _size(entry):
            raw = store.read(entry.digest)  # a damaged blob is called that
    except (MissingBlob, BadBlob, OSError) as error:
        raise StageFailed(f"tensor {entry.name}: {error}") from None
    return _shaped(entry, raw)


def _proven(entry: TensorEntry, store: BlobStore) -> Tensor:
    """The blob as a tensor, its bytes checked. For what is not hashed afterwards as it came."""
    try:
        raw = store.read(entry.digest)
    except (MissingBlob, BadBlob, OSError) as error:
        raise StageFailed(f"tensor {entry.name}: {error}") from None
    return _shaped(entry, raw)


def _shaped(entry: TensorEntry, raw: memoryview) -> Tensor:
    if raw.nbytes != _size(entry):
        raise StageFailed(
            f"tensor {entry.name}: blob of {raw.nbytes} bytes, shape {list(entry.shape)} of {entry.dtype} "
            f"needs {_size(entry)}"
        )
    return torch.frombuffer(raw, dtype=DTYPES[entry.dtype]).reshape(entry.shape)


def _size(entry: TensorEntry) -> int:
    return DTYPES[entry.dtype].itemsize * prod(entry.shape)


def _held_digest(tensor: Tensor) -> str:
    return digest_of(tensor, tensor.dtype)


def loaders(*, serving: bool) -> int:
    """Threads that a load may use: all cores, but for one where requests are decoded, and not more than `LOADERS`."""
    return max(1, min(LOADERS, len(os.sched_getaffinity(0)) - serving))


def release_memory() -> None:
    """Collect cycles (modules hold them) and hand freed pages back to the system."""
    gc.collect()
    _trim()


def _trim() -> None:
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not glibc: its allocator decides by itself
        return

"""One set of weights: a model whose every tensor was read from blobs, read back, and compared with its
manifest.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator

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
from syncline.rollout.engines.expected import Expected
from syncline.runtime.store import BadBlob, BlobStore, MissingBlob


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

    def load(self, signed: SignedManifest, manifest: VersionManifest, store: BlobStore) -> str:
        """Write every tensor of `manifest`, read each back as the forward pass will; returns the loaded
        digest.

        See `version_path.loaded_digest`: each tensor's digest is taken from what was read back. A weight that the
        engine quantises itself (route `bf16_bridge`) has the digest of the BF16 blob that its codes were made from; its
        codes are compared with a second quantisation of that blob. Raises `StageFailed` naming the tensor.
        """
        self.version, self.signed, self.digest, self.contents = None, None, "", {}
        self.manifest, self.copied = None, 0
        read_back = []
        bridged = self.expected.bridged
        outer = dict(self._outer_scales(manifest, store)) if bridged else {}
        with torch.no_grad():
            for entry in manifest.tensors:
                planned = bridged.get(entry.name)
                if planned is None:
                    found = self._take(entry, store)
                else:
                    found = self._quantise(entry, planned, outer.get(entry.name), store)
                read_back.append(msgspec.structs.replace(entry, digest=found))
        self.version, self.digest, self.signed = manifest.version, manifest.digest(), signed
        self.manifest = manifest
        self.contents = {entry.name: entry.digest for entry in read_back}
        return loaded_digest(read_back)

    def _take(self, entry: TensorEntry, store: BlobStore) -> str:
        """Bring one tensor of the manifest where it belongs. Returns the digest of what lies there then."""
        slot = self.packed.slots.get(entry.name)
        tied = slot is None and entry.name not in self.packed.views
        own = self.packed.views[self._ties.get(entry.name, entry.name)] if slot is None else slot
        dtype = DTYPES[entry.dtype]
        if self._held.get(entry.name) == entry.digest and _digest(own.to(dtype)) == entry.digest:
            return entry.digest
        self._held.pop(entry.name, None)
        if not tied:  # a tied name that the manifest carries none the less is only compared
            own.copy_(_tensor(entry, store))
            self.copied += entry.nbytes
        found = _digest(own.to(dtype))
        if found != entry.digest:
            raise StageFailed(
                f"tensor {entry.name} reads back with digest {found}, the manifest says {entry.digest}"
            )
        self._held[entry.name] = found
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
            largest = [_tensor(entry, store).abs().amax().float() for entry in members]
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
            self._held.get(name) == _digest(self.packed.slots[name]) for name in names
        ):
            return entry.digest
        self._quantised.pop(entry.name, None)
        wide = _tensor(entry, store)
        try:
            written = self.packed.quantise(planned, wide, outer)
        except NotQuantizable as error:
            raise StageFailed(str(error)) from None
        for name, made in written.items():
            if _digest(self.packed.slots[name]) != _digest(made):
                raise StageFailed(f"tensor {name} does not read back as {entry.name} was quantised")
            self._held[name] = _digest(made)
        found = _digest(wide)
        self._quantised[entry.name] = made_of
        self.copied += entry.nbytes
        return found


def _tensor(entry: TensorEntry, store: BlobStore) -> Tensor:
    """The blob as a tensor (memory-mapped if large)."""
    try:
        raw = store.read(entry.digest)
    except (MissingBlob, BadBlob, OSError) as error:
        raise StageFailed(f"tensor {entry.name}: {error}") from None
    dtype = DTYPES[entry.dtype]
    size = dtype.itemsize
    for width in entry.shape:
        size *= width
    if raw.nbytes != size:
        raise StageFailed(
            f"tensor {entry.name}: blob of {raw.nbytes} bytes, shape {list(entry.shape)} of {entry.dtype} "
            f"needs {size}"
        )
    return torch.frombuffer(raw, dtype=dtype).reshape(entry.shape)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


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

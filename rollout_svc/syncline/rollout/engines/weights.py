"""One set of weights: a model whose every tensor was read from blobs, read back, and compared with its
manifest.
"""

from __future__ import annotations

import gc
import hashlib

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from syncline.contract.version_path import SignedManifest, VersionId, VersionManifest, loaded_digest
from syncline.reference.model import ModelFolder, empty_model
from syncline.reference.routes import RouteTap
from syncline.reference.state import StatePlan, check_names, named_windows, state_plan
from syncline.rollout.engine import StageFailed
from syncline.runtime.store import BadBlob, BlobStore, MissingBlob

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
REPRESENTATIONS = ("bf16",)


class Weights:
    """A model and the version that its tensors are. `version` is None while a load is under way or failed."""

    def __init__(self, folder: ModelFolder, plan: StatePlan | None) -> None:
        self.model: PreTrainedModel = empty_model(folder)
        self.model.requires_grad_(False)
        self.plan = plan or state_plan(self.model)
        self.taps = RouteTap(self.model)
        self.views = named_windows(self.model, self.plan)
        self.version: VersionId | None = None
        self.digest = ""
        self.signed: SignedManifest | None = None
        self.contents: dict[str, str] = {}  # tensor name -> digest, as read back

    def load(self, signed: SignedManifest, manifest: VersionManifest, store: BlobStore) -> str:
        """Write every tensor of `manifest`, read each back as the forward pass will; returns the loaded
        digest.

        See `version_path.loaded_digest`: each tensor's digest is taken from what was read back.
        Raises `StageFailed` naming the tensor.
        """
        self.version, self.signed, self.digest, self.contents = None, None, "", {}
        read_back = []
        for entry in manifest.tensors:
            view = self.views.get(entry.name)
            with torch.no_grad():
                tensor = _tensor(entry.name, entry.dtype, entry.shape, entry.digest, store)
                if view is None:  # a tied name that the manifest carries none the less
                    view = self.views[dict(self.plan.ties)[entry.name]]
                else:
                    view.copy_(tensor)
                found = _digest(view.to(tensor.dtype))
            if found != entry.digest:
                raise StageFailed(
                    f"tensor {entry.name} reads back with digest {found}, the manifest says {entry.digest}"
                )
            read_back.append(msgspec.structs.replace(entry, digest=found))
        self.version, self.digest, self.signed = manifest.version, manifest.digest(), signed
        self.contents = {entry.name: entry.digest for entry in read_back}
        return loaded_digest(read_back)


def check_manifest(manifest: VersionManifest, plan: StatePlan, folder: ModelFolder) -> None:
    """Raise `StageFailed` unless `manifest` lists exactly this model's tensors in a form read here."""
    if manifest.model != folder.config_digest:
        raise StageFailed(
            f"manifest of version {manifest.version} is for another model (config {manifest.model})"
        )
    if manifest.representation not in REPRESENTATIONS:
        raise StageFailed(f"manifest has representation {manifest.representation!r}, this engine reads bf16")
    if manifest.padding:
        raise StageFailed(f"tensor {min(manifest.padding)} is padded, and this engine takes tensors unpadded")
    names = [entry.name for entry in manifest.tensors]
    if len(set(names)) != len(names):
        raise StageFailed(f"tensor {next(n for n in names if names.count(n) > 1)} is listed twice")
    for entry in manifest.tensors:
        if entry.dtype not in _DTYPES:
            raise StageFailed(
                f"tensor {entry.name} has dtype {entry.dtype}, this engine reads {sorted(_DTYPES)}"
            )
    for absent, source in manifest.ties:
        if (absent, source) not in plan.ties:
            raise StageFailed(f"tensor {absent} is tied to {source} in the manifest and not in the model")
    try:
        check_names(plan, {entry.name: entry.shape for entry in manifest.tensors})
    except ValueError as error:
        raise StageFailed(str(error)) from None


def _tensor(name: str, dtype: str, shape: tuple[int, ...], digest: str, store: BlobStore) -> Tensor:
    """The blob as a tensor (memory-mapped if large)."""
    try:
        raw = store.read(digest)
    except (MissingBlob, BadBlob) as error:
        raise StageFailed(f"tensor {name}: {error}") from None
    size = _DTYPES[dtype].itemsize
    for width in shape:
        size *= width
    if raw.nbytes != size:
        raise StageFailed(
            f"tensor {name}: blob of {raw.nbytes} bytes, shape {list(shape)} of {dtype} needs {size}"
        )
    return torch.frombuffer(raw, dtype=_DTYPES[dtype]).reshape(shape)


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

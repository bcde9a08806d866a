"""Tensors that are exported: first what each is, then their bytes, one after another.

`Stored` reads a version: signed manifest, blobs under their digests. Its blobs are linked to a place of the export's
own before anything is read, so that a version which is retired meanwhile is exported all the same, and sync waits for
nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from syncline.contract.adapters import is_adapter
from syncline.contract.plan import PrecisionPlan, resolve
from syncline.contract.precision import PrecisionContract
from syncline.contract.version_path import BadManifest, TensorEntry, VersionId, VersionManifest, opened
from syncline.exporting.held import CannotExport
from syncline.runtime.store import BadBlob, BlobStore, MissingBlob, MissingManifest

Buffer = bytes | bytearray | memoryview


class Fact(msgspec.Struct, frozen=True):
    """One tensor before its bytes. `digest`: sha256 hex that the bytes written must have; "": nobody knows it yet."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    digest: str = ""


class Source(Protocol):
    """Where tensors come from. `facts`: checkpoint name -> what it is."""

    @property
    def facts(self) -> Mapping[str, Fact]: ...

    def tensors(self, names: list[str]) -> Iterator[tuple[str, Buffer]]:
        """Bytes of `names`, each dropped before the next is read. In any order."""
        ...


def read_manifest(folder: Path, version: VersionId, contract: str) -> VersionManifest:
    """The manifest of `version` of the job in `folder`, its signature checked with the job's key.

    Raises `CannotExport` for one that is gone, not signed with that key, of another job, version or contract.
    """
    key = folder / "key"
    if not key.is_file():
        raise CannotExport("the job has no manifest key: nothing says that its versions are its own")
    try:
        manifest = opened(BlobStore(folder / "store").read_manifest(version), key.read_bytes())
    except (BadManifest, MissingManifest) as error:
        raise CannotExport(f"version {version}: {error}") from None
    for what, found, due in (
        ("job", manifest.job, folder.name),
        ("version", str(manifest.version), str(version)),
        ("contract", manifest.contract, contract),
    ):
        if found != due:
            raise CannotExport(f"version {version}: its manifest is of {what} {found}, not {due}")
    return manifest


def pin(store: BlobStore, manifest: VersionManifest, place: Path) -> BlobStore:
    """A store at `place` (new, on the same file system) with links to the manifest's blobs.

    Raises `CannotExport` naming a tensor whose blob is gone.
    """
    own = BlobStore(place)
    with store.hold():  # for as long as links take: a collecting sync waits that long
        for entry in manifest.tensors:
            if own.has(entry.digest):
                continue
            try:
                os.link(store.path(entry.digest), own.path(entry.digest))
            except FileNotFoundError:
                raise CannotExport(
                    f"version {manifest.version}: the blob of {entry.name} is gone from the store"
                ) from None
    return own


class Stored:
    """The tensors of a manifest as they are stored. `names`: which of them; None: all."""

    def __init__(self, store: BlobStore, entries: Mapping[str, TensorEntry]) -> None:
        self._store, self._entries = store, dict(entries)
        self._facts = {name: Fact(e.dtype, tuple(e.shape), e.digest) for name, e in entries.items()}

    @property
    def facts(self) -> Mapping[str, Fact]:
        """What each tensor is."""
        return self._facts

    def tensors(self, names: list[str]) -> Iterator[tuple[str, Buffer]]:
        """Bytes as they are stored. What they are is checked when they have been written: `Fact.digest`."""
        for name in names:
            yield name, blob(self._store, self._entries[name])


def blob(store: BlobStore, entry: TensorEntry, checked: bool = False) -> memoryview:
    """The bytes of `entry`. Raises `CannotExport` naming the tensor. `checked`: against its digest, now."""
    try:
        raw = store.read(entry.digest) if checked else store.mapped(entry.digest)
    except (MissingBlob, BadBlob) as error:
        raise CannotExport(f"tensor {entry.name}: {error}") from None
    if raw.nbytes != entry.nbytes:
        raise CannotExport(
            f"tensor {entry.name}: blob of {raw.nbytes} bytes, the manifest says {entry.nbytes}"
        )
    return raw


# ---- what a manifest's tensors were made from -----------------------------------------------------------------
def plan_of(contract: PrecisionContract, manifest: VersionManifest, store: BlobStore) -> PrecisionPlan:
    """The plan that the manifest's tensors were made by, resolved from them. Raises `CannotExport` for another one."""
    shapes = {}
    for entry in manifest.tensors:
        if is_adapter(entry.name) and contract.adapter is not None:
            continue
        if entry.name.endswith(".weight_shape") and entry.dtype == "I64":
            raw = blob(store, entry, checked=True)
            shapes[entry.source] = tuple(memoryview(bytes(raw)).cast("q"))
        elif not entry.source and entry.dtype in ("U8", "F8_E4M3"):
            shapes.setdefault(entry.name, _codes_shape(entry, manifest.padding))
        elif entry.name == f"{entry.source}_packed":
            shapes.setdefault(entry.source, _codes_shape(entry, manifest.padding))
        elif not entry.source:
            shapes[entry.name] = tuple(entry.shape)
    plan = resolve(contract, shapes)
    if plan.digest() != manifest.plan:
        raise CannotExport(
            f"version {manifest.version}: its tensors give the precision plan {plan.digest()}, its manifest says "
            f"{manifest.plan}"
        )
    return plan


def _codes_shape(entry: TensorEntry, padding: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of the values that codes stand for: two to a byte in U8, one in E4M3."""
    if entry.name in padding:
        return tuple(padding[entry.name])
    rows, columns = entry.shape
    return rows, 2 * columns if entry.dtype == "U8" else columns

"""One job's store with forged versions, sync's side of a kind over it, and workers that pull."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import msgspec

from syncline.contract.job import TransferSpec
from syncline.contract.pulled import Pulled
from syncline.contract.version_path import (
    SignedManifest,
    SyncOrder,
    TensorEntry,
    VersionId,
    VersionManifest,
    sign,
)
from syncline.runtime.store import BlobStore
from syncline.transport.kinds import offering, pulling
from syncline.transport.puller import Puller
from syncline.transport.transport import Offering, Pulling

KEY = b"k" * 32
JOB = "j0123456789"
SIZES = {"embed": 2_500_000, "layer.0": 300_001, "layer.1": 300_001, "norm": 64, "none": 0}
"""Bytes of each tensor: over two buckets, an odd size, a small one and an empty one."""
TOTAL = sum(SIZES.values())


def content(name: str, version: int) -> bytes:
    """A tensor's bytes. `embed` never changes, others do with each version."""
    seed = name if name == "embed" else f"{name}/{version}"
    return random.Random(seed).randbytes(SIZES[name])


class Rig:
    """The job's store below `folder`, offered as `kind`."""

    def __init__(self, folder: Path, kind: str, **more: Any) -> None:
        self.folder = folder
        self.spec = TransferSpec.model_validate({"kind": kind, "bucket_mb": 1, "timeout": 20.0, **more})
        self.store = BlobStore(folder / "store")
        self.offering = self.offered()
        self.seq = 0
        self._open: list[Pulling] = []

    def offered(self) -> Offering:
        """Sync's side, as a new process would make it."""
        self.offering = offering(self.spec, self.folder / "store", JOB, KEY, "127.0.0.1")
        return self.offering

    def publish(self, number: int, key: bytes = KEY) -> VersionManifest:
        version = VersionId(0, number)
        tensors = []
        for name, size in sorted(SIZES.items()):
            digest = self.store.put(content(name, number))
            tensors.append(TensorEntry(name=name, dtype="U8", shape=(size,), nbytes=size, digest=digest))
        manifest = VersionManifest(
            job=JOB,
            version=version,
            parent=None,
            optimizer_step=number,
            contract="c",
            representation="bf16",
            model="m",
            tensors=tuple(tensors),
        )
        self.store.write_manifest(sign(manifest, key))
        self.offering.offer(version)
        return manifest

    def puller(self, worker: str = "w0", own: Path | None = None, **more: Any) -> Pulling:
        own = own or self.folder / worker
        own.mkdir(exist_ok=True)
        spec = self.spec.model_copy(update=more)
        made = pulling(spec, self.folder / "store", own, JOB, worker, KEY)
        self._open.append(made)
        return made

    def order(self, manifest: VersionManifest, worker: str = "w0", source: str | None = None) -> SyncOrder:
        self.seq += 1
        if source is None:
            source = self.offering.source(manifest.version, (worker,), self.seq)
        return SyncOrder(
            order="stage",
            version=manifest.version,
            digest=manifest.digest(),
            workers=(worker,),
            seq=self.seq,
            source=source,
        )

    def pull(self, worker: Pulling, manifest: VersionManifest, serving: int | None = None) -> Pulled:
        """An order to stage and its pull by `worker`, which is w0; what came is compared byte by byte."""
        version = None if serving is None else VersionId(0, serving)
        signed, pulled = worker.pull(self.order(manifest), version)
        same(worker, signed, manifest)
        return pulled

    def close(self) -> None:
        for made in self._open:
            made.close()
        self.offering.close()


def same(worker: Pulling, signed: SignedManifest, manifest: VersionManifest) -> None:
    """The worker holds what was published."""
    assert msgspec.json.decode(signed.manifest, type=VersionManifest) == manifest
    for entry in manifest.tensors:
        raw = worker.store.read(entry.digest)
        assert bytes(raw) == content(entry.name, manifest.version.number)
        assert hashlib.sha256(raw).hexdigest() == entry.digest


def half(worker: Pulling, manifest: VersionManifest, name: str, data: bytes) -> None:
    """As if an earlier pull of the tensor had broken behind `data`."""
    assert isinstance(worker, Puller)
    digest = next(entry.digest for entry in manifest.tensors if entry.name == name)
    (worker.store.path(digest).parents[2] / "incoming" / digest).write_bytes(data)

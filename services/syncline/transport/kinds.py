"""The one place that knows the kinds by name."""

from __future__ import annotations

from pathlib import Path

from syncline.contract.job import TransferSpec
from syncline.runtime.store import BlobStore
from syncline.transport.files import SharedFiles
from syncline.transport.transport import Offering, Pulling


def offering(spec: TransferSpec, shared: Path, job: str, key: bytes, host: str) -> Offering:
    """Sync's side of the job's transport, over the job's store `shared`. `host`: where it listens, if it does."""
    match spec.kind:
        case "files":
            return SharedFiles(BlobStore(shared), key)
        case _:
            raise ValueError(f"transfer.kind: {spec.kind!r} is not offered yet")


def pulling(spec: TransferSpec, shared: Path, own: Path, job: str, worker: str, key: bytes) -> Pulling:
    """A worker's side.

    shared   the job's store, which `files` reads
    own      folder for a store of the worker's own, made where the kind needs one
    """
    match spec.kind:
        case "files":
            return SharedFiles(BlobStore(shared), key)
        case _:
            raise ValueError(f"transfer.kind: {spec.kind!r} is not offered yet")

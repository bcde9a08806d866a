"""The one place that knows the kinds by name."""

from __future__ import annotations

from pathlib import Path

from syncline.contract.job import TransferSpec
from syncline.runtime.store import BlobStore
from syncline.transport.files import SharedFiles
from syncline.transport.http import HttpFetch, HttpOffering
from syncline.transport.puller import Puller
from syncline.transport.transport import Fetch, Offering, Pulling

_MIB = 1 << 20


def offering(spec: TransferSpec, shared: Path, job: str, key: bytes, host: str) -> Offering:
    """Sync's side of the job's transport, over the job's store `shared`. `host`: where it listens, if it does.

    Raises `ValueError` naming the key of the spec that cannot be served here.
    """
    store, bucket = BlobStore(shared), spec.bucket_mb * _MIB
    match spec.kind:
        case "files":
            return SharedFiles(store, key)
        case "http":
            return HttpOffering(store, key, host)
        case "group":
            from syncline.transport.group import GroupOffering  # torch

            return GroupOffering(store, key, host, spec.timeout, bucket)
        case "objects":
            from syncline.transport.objects import ObjectsOffering  # fsspec

            return ObjectsOffering(store, _url(spec), job)


def pulling(spec: TransferSpec, shared: Path, own: Path, job: str, worker: str, key: bytes) -> Pulling:
    """A worker's side. Raises as `offering` does.

    shared   the job's store, which `files` reads
    own      folder for a store of the worker's own, made where the kind needs one
    """
    if spec.kind == "files":
        return SharedFiles(BlobStore(shared), key)
    wait = spec.timeout / 4 if spec.deltas else None
    return Puller(_fetch(spec, job, worker, key), own, key, worker, spec.timeout, wait)


def _fetch(spec: TransferSpec, job: str, worker: str, key: bytes) -> Fetch:
    bucket = spec.bucket_mb * _MIB
    match spec.kind:
        case "http":
            return HttpFetch(key, bucket)
        case "group":
            from syncline.transport.group import GroupFetch  # torch

            return GroupFetch(key, worker, bucket)
        case "objects":
            from syncline.transport.objects import ObjectsFetch  # fsspec

            return ObjectsFetch(_url(spec), job, bucket)
        case "files":
            raise AssertionError("nothing moves under kind 'files'")


def _url(spec: TransferSpec) -> str:
    if spec.url is None:
        raise ValueError("transfer.url is missing for kind 'objects'")
    return spec.url

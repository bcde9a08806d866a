"""What a worker pulls over HTTP for the next version: by deltas, and whole.

Sync's side as it runs: the versions in a store, `sync/deltas.py` making each version's deltas and their index, the
HTTP server over both. Two workers with stores of their own hold the version before; one asks for deltas, one does not.
Either pulls only tensors that changed. Bytes are those of payload, with the signed index that a worker reads first. A
delta pull ends when every tensor is made, hashed and in the worker's store, as a full pull does.

Server and worker share this process and the loopback, which carries bytes faster than any network: there, seconds say
what deltas cost, and bytes what they save.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path

import msgspec
from rows import Say

from syncline.contract.pulled import Pulled
from syncline.contract.version_path import SignedManifest, SyncOrder, TensorEntry, VersionManifest, opened
from syncline.runtime.store import BlobStore
from syncline.sync.deltas import Deltas
from syncline.transport.http import HttpFetch, HttpOffering
from syncline.transport.puller import Puller

BUCKET = 16 << 20  # bytes of one request
PATIENCE = 60.0  # seconds that deltas of one version, or one pull, may take


class Kept(msgspec.Struct, frozen=True):
    """A version of a run, after the run: its manifest, and its tensors by name."""

    signed: SignedManifest
    tensors: dict[str, tuple[TensorEntry, bytes]]


class Pull(msgspec.Struct, frozen=True):
    """One version that came."""

    nbytes: int  # that travelled
    wall: float
    cpu: float  # of server and worker
    pulled: Pulled


def tell(say: Say, case: str, kept: Sequence[Kept], key: bytes, folder: Path, repetitions: int) -> None:
    """The rows of one run. Raises `AssertionError` for a delta pull that is larger than the full one."""
    served = Served(kept, key, folder / "served")
    try:
        bytes_of: dict[str, list[int]] = {"delta": [], "full": []}
        walls, cpus = [], []
        for i in range(1, len(kept)):
            pulls = {how: [served.pull(i, how == "delta") for _ in range(repetitions)] for how in bytes_of}
            for how, several in pulls.items():
                bytes_of[how].append(several[-1].nbytes)
            best = {how: (min(p.wall for p in s), min(p.cpu for p in s)) for how, s in pulls.items()}
            walls.append(best["delta"][0] / best["full"][0])
            cpus.append(best["delta"][1] / best["full"][1])
            check(case, pulls["delta"][-1], pulls["full"][-1])
    finally:
        served.close()
    over = [d / f for d, f in zip(bytes_of["delta"], bytes_of["full"], strict=True)]
    say.ratio(case, "bytes pulled over HTTP, deltas over full", over, "the changed tensors whole, same run")
    say.ratio(
        case, "seconds of a pull over HTTP, deltas over full", walls, "the changed tensors whole, same run"
    )
    say.ratio(case, "CPU of a pull over HTTP, deltas over full", cpus, "the changed tensors whole, same run")
    for how, counts in bytes_of.items():
        say.count(case, f"pulled over HTTP, {how}", sum(counts) / len(counts) / 1e3, "KB per version")


def check(case: str, delta: Pull, full: Pull) -> None:
    """Deltas were used, and never cost more bytes than they save."""
    if delta.nbytes > full.nbytes or full.pulled.deltas or delta.pulled.fallbacks.keys() - {"no delta"}:
        raise AssertionError(f"{case}: by deltas {delta}, whole {full}")


class Served:
    """Versions in a store of sync's, with their deltas, behind an HTTP server."""

    def __init__(self, kept: Sequence[Kept], key: bytes, folder: Path) -> None:
        self._folder, self._key = folder, key
        self._store = BlobStore(folder / "store")
        self._manifests = [opened(version.signed, key) for version in kept]
        for version in kept:
            with self._store.hold():
                for _, raw in version.tensors.values():
                    self._store.put(raw)
                self._store.write_manifest(version.signed)
        for _, after in pairwise(self._manifests):
            self._compare(after)
        self._offering = HttpOffering(self._store, key, "127.0.0.1")
        self._workers, self._orders = count(), count()

    def pull(self, i: int, by_delta: bool) -> Pull:
        """Version `i` to a new worker that holds the one before."""
        own = self._folder / f"worker{next(self._workers)}"
        own.mkdir()
        fetch = HttpFetch(self._key, BUCKET)
        worker = Puller(fetch, own, self._key, own.name, PATIENCE, PATIENCE if by_delta else None)
        try:
            before, after = self._manifests[i - 1], self._manifests[i]
            worker.pull(self._order(before), None)
            order = self._order(after)
            wall, cpu = time.perf_counter(), time.process_time()
            _, pulled = worker.pull(order, before.version)
            took = (time.perf_counter() - wall, time.process_time() - cpu)
        finally:
            worker.close()
        index = self._store.index_path(after.version).stat().st_size if by_delta else 0
        return Pull(pulled.nbytes + index, *took, pulled)

    def close(self) -> None:
        self._offering.close()

    def _order(self, manifest: VersionManifest) -> SyncOrder:
        seq = next(self._orders)
        source = self._offering.source(manifest.version, (), seq)
        return SyncOrder(
            order="stage",
            version=manifest.version,
            digest=manifest.digest(),
            workers=(),
            seq=seq,
            source=source,
        )

    def _compare(self, manifest: VersionManifest) -> None:
        """Have sync make the deltas of `manifest`, and wait for their index."""
        deltas, until = Deltas(self._store, manifest.job, self._key, wanted=True), time.monotonic() + PATIENCE
        deltas.start(manifest)
        while not (done := deltas.done()):
            if time.monotonic() > until:
                raise TimeoutError(f"deltas of version {manifest.version} took more than {PATIENCE:g} s")
            time.sleep(0.01)
        deltas.close()
        if not done[0].indexed or done[0].problems:
            raise RuntimeError(f"deltas of version {manifest.version}: {done[0]}")

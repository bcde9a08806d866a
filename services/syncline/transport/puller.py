"""A worker's own store, and how it comes to hold a version: what all kinds share but `files`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from syncline.contract.pulled import Pulled
from syncline.contract.version_path import (
    BadManifest,
    SignedManifest,
    SyncOrder,
    TensorEntry,
    VersionId,
    VersionManifest,
    opened,
)
from syncline.runtime.store import BadBlob, BlobStore
from syncline.transport.bydelta import ByDelta
from syncline.transport.incoming import Incoming
from syncline.transport.transport import (
    Damaged,
    Deadline,
    Fetch,
    Late,
    Moved,
    PullFailed,
    Unreachable,
)

T = TypeVar("T")

FIRST, LONGEST = 0.05, 1.0  # seconds between two tries, doubling
PATIENCE = 10.0  # seconds without a byte until a source is unreachable: another order may name a living one
_LOG = logging.getLogger("syncline.transport")


class Puller:
    """Pulls into `own/store`; what is half there lies in `own/incoming`. See `transport.Pulling`.

    key      the job's, which signs manifests
    timeout  seconds for one version
    deltas   seconds to wait for an index of deltas, which sync makes after a version is published; None: ask for none
    """

    def __init__(
        self, fetch: Fetch, own: Path, key: bytes, worker: str, timeout: float, deltas: float | None = None
    ) -> None:
        self.store = BlobStore(own / "store")
        self._incoming = own / "incoming"
        self._incoming.mkdir(exist_ok=True)
        self._fetch, self._key, self._worker, self._timeout = fetch, key, worker, timeout
        self._deltas = deltas
        self._wanted = -1  # orders below this are given up
        self._until: Deadline | None = None
        self._doubt = True  # of what an earlier process left

    def pull(self, order: SyncOrder, serving: VersionId | None) -> tuple[SignedManifest, Pulled]:
        began = time.monotonic()
        until = self._until = Deadline(self._timeout, lambda: order.seq < self._wanted)
        moved = Moved()
        try:
            with _told(f"worker {self._worker}: version {order.version}"):
                self._fetch.seek(order.source)
                signed, manifest = self._manifest(order, until)
                self._make_room(manifest, serving)
                entries = {entry.digest: entry for entry in manifest.tensors}.values()
                by_delta = self._by_delta(manifest, moved, until)
                if by_delta is not None:
                    lacking = [entry for entry in entries if not self._holds(entry.digest, entry.nbytes)]
                    by_delta.learn(lacking, self._deltas or 0.0, moved, until)
                for entry in entries:
                    with _told(f"tensor {entry.name}"):
                        self._take(entry, by_delta, moved, until)
                self._doubt = False
                self.store.write_manifest(signed)
        finally:
            self._fetch.done()
        return signed, moved.told(self._fetch.kind, time.monotonic() - began)

    def supersede(self, seq: int) -> None:
        self._wanted = max(self._wanted, seq)
        if self._until is not None and self._until.superseded:
            self._until.wake()
            self._fetch.interrupt()

    def doubt(self) -> None:
        self._doubt = True

    def close(self) -> None:
        self._fetch.close()

    # ---- one version
    def _manifest(self, order: SyncOrder, until: Deadline) -> tuple[SignedManifest, VersionManifest]:
        """The ordered manifest. Raises `BadManifest`, `Damaged` if it is another one."""
        signed = self._again("manifest", lambda: self._fetch.manifest(order.version, until), until, lambda: 0)
        manifest = opened(signed, self._key)
        if manifest.version != order.version or manifest.digest() != order.digest:
            raise Damaged(f"the manifest that came is {manifest.version} with digest {manifest.digest()}")
        return signed, manifest

    def _make_room(self, manifest: VersionManifest, serving: VersionId | None) -> None:
        """Delete what neither this version names nor the one that serves, or that a worker before this one served: it
        may be the base of deltas.
        """
        needed = {entry.digest for entry in manifest.tensors}
        for path in self._incoming.iterdir():
            if path.name not in needed:
                path.unlink()
        last = self.store.manifests()[-1:] if serving is None else [serving]
        keep = {manifest.version, *last}
        try:
            self.store.collect(keep, spare=lambda: needed)
        except BadManifest as error:
            _LOG.warning("the worker's own store: %s", error)
            self.store.collect(set(), spare=lambda: needed)

    def _by_delta(self, manifest: VersionManifest, moved: Moved, until: Deadline) -> ByDelta | None:
        """What makes tensors of deltas; None: the job wants none, or there is nothing here to start from."""
        if self._deltas is None or not self.store.manifests():
            return None

        def extra(name: str) -> bytes:
            return self._again(name, lambda: self._fetch.extra(name, until), until, lambda: 0)

        def bring(digest: str, nbytes: int) -> None:
            if not self._holds(digest, nbytes):
                moved.deltas += self._whole(digest, nbytes, moved, until)

        return ByDelta(manifest, self.store, self._key, extra, bring, self._keep)

    def _keep(self, digest: str, data: memoryview) -> None:
        """Put what was made here into the store. What had come of the whole blob is of no use any more."""
        into = Incoming(self._incoming / digest, digest, len(data), anew=True)
        try:
            into.write(data)
            into.finish(self.store.path(digest))
        finally:
            into.close()

    def _take(self, entry: TensorEntry, by_delta: ByDelta | None, moved: Moved, until: Deadline) -> None:
        """See that the store holds the tensor's blob."""
        if self._holds(entry.digest, entry.nbytes):
            moved.held += entry.nbytes
            return
        if by_delta is not None and by_delta.make(entry, moved):
            return
        moved.full += self._whole(entry.digest, entry.nbytes, moved, until)

    def _holds(self, digest: str, nbytes: int) -> bool:
        path = self.store.path(digest)
        if not path.is_file():
            return False
        try:
            whole = self.store.read(digest).nbytes == nbytes if self._doubt else path.stat().st_size == nbytes
        except (BadBlob, OSError, ValueError) as error:
            _LOG.warning("the worker's own store: %s", error)
            whole = False
        if not whole:
            path.unlink()
        return whole

    def _whole(self, digest: str, nbytes: int, moved: Moved, until: Deadline) -> int:
        """Pull the blob `digest` into the store, hashed. Returns the bytes that came now."""
        into = Incoming(self._incoming / digest, digest, nbytes)
        resumed = into.resumed
        try:
            self._fill(into, until)
            try:
                into.finish(self.store.path(digest))
            except Damaged:
                if not resumed:
                    raise
                # what lay there from before may be what is damaged
                resumed, into = 0, Incoming(self._incoming / digest, digest, nbytes)
                self._fill(into, until)
                into.finish(self.store.path(digest))
        finally:
            into.close()
        moved.resumed += resumed
        return nbytes - resumed

    def _fill(self, into: Incoming, until: Deadline) -> None:
        if into.held < into.nbytes:
            what = f"blob {into.digest}"
            self._again(what, lambda: self._fetch.blob(into, until), until, lambda: into.held)

    # ---- trying again
    def _again(self, what: str, do: Callable[[], T], until: Deadline, progress: Callable[[], int]) -> T:
        """`do` until it does not raise `OSError`; what came stays. Raises `Unreachable`, `Late`, what `do` raises."""
        rest, last, at, since = FIRST, "", progress(), time.monotonic()
        while True:
            try:
                until.left()
                return do()
            except Late as error:
                raise (Unreachable if last else Late)(
                    f"{what}: {error}" + (f": {last}" if last else "")
                ) from None
            except OSError as error:
                last = str(error) or type(error).__name__
            if progress() > at:
                rest, at, since = FIRST, progress(), time.monotonic()
            elif time.monotonic() > since + PATIENCE:
                raise Unreachable(f"{what}: nothing came for {PATIENCE:g} s: {last}")
            until.rest(rest)
            rest = min(2 * rest, LONGEST)


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Put `where` before the message of what fails inside."""
    try:
        yield
    except PullFailed as error:
        raise type(error)(f"{where}: {error}") from error
    except BadManifest as error:
        raise BadManifest(f"{where}: {error}") from error

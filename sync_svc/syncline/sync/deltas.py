"""Deltas of a published version against the one before, made on a thread of their own: publication waits for none.

Consumes:      manifests and blobs of the store.
Produces:      deltas as blobs, and a version's signed index of them; what changed, for the version's record.
Waits for:     nothing. A newer version ends the work on an older one; what is made by then stays and is named.
Unblocked by:  `start`.

Whatever goes wrong here is told and counted, and costs a version its deltas: workers then pull whole tensors.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from syncline.contract.deltas import DeltaEntry, DeltaIndex, sign_index
from syncline.contract.version_path import BadManifest, TensorEntry, VersionId, VersionManifest, opened
from syncline.runtime.delta import GRAIN, changed, encode
from syncline.runtime.store import BadBlob, BlobStore, MissingBlob, MissingManifest


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What a version is against the one published before. Bytes are of the store, elements as `GRAIN` has them."""

    version: VersionId
    before: VersionId | None  # None: it is the first, or the one before cannot be read
    changed_bytes: int | None = None  # of contents that the one before does not have; None: no one before
    changed_share: float | None = None  # of elements, by name; None: not compared to the end
    delta_bytes: int | None = None  # of deltas, and of changed contents without one; None: no deltas
    indexed: bool = False  # an index was written
    problems: tuple[str, ...] = ()  # each names its tensor


class Deltas:
    """Compares versions of one job, and makes deltas if `wanted`. Driven from one thread."""

    def __init__(self, store: BlobStore, job: str, key: bytes, wanted: bool) -> None:
        self._store, self._job, self._key, self._wanted = store, job, key, wanted
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deltas")
        self._running: list[Future[Compared]] = []
        self._stop = threading.Event()
        self._spare: set[str] = set()
        self._lock = threading.Lock()

    def start(self, manifest: VersionManifest) -> None:
        """Begin on a version that was published; work on an older one ends with what it has."""
        self._stop.set()
        self._stop = threading.Event()
        self._running.append(self._pool.submit(self._compare, manifest, self._stop))

    def done(self) -> list[Compared]:
        """What was finished since the last call, oldest first. Raises what no error of a disk or a file explains."""
        over = [future for future in self._running if future.done()]
        self._running = [future for future in self._running if future not in over]
        return [future.result() for future in over]

    def spare(self) -> set[str]:
        """Blobs that the next index will name: `BlobStore.collect` leaves them alone."""
        with self._lock:
            return set(self._spare)

    def close(self) -> None:
        """End the work, once the tensor under way is done."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    # ---- on the thread
    def _compare(self, manifest: VersionManifest, stop: threading.Event) -> Compared:
        before, problem = self._before(manifest.version)
        work = _Work(manifest, before, problem)
        indexed = False
        try:
            for new, old in work.pairs():
                if stop.is_set():
                    work.exact = False
                    break
                self._tensor(work, new, old)
            if self._wanted:
                indexed = self._index(work)
        except OSError as error:  # a full disk: nothing names what was stored, the next collection takes it
            work.problem(error.strerror or str(error))
        finally:
            with self._lock:
                self._spare.clear()
        return work.told(indexed)

    def _before(self, version: VersionId) -> tuple[VersionManifest | None, str]:
        """The version published before, and why it cannot be had."""
        older = [known for known in self._store.manifests() if known < version]
        try:
            return (opened(self._store.read_manifest(older[-1]), self._key) if older else None), ""
        except (BadManifest, MissingManifest) as error:
            return None, str(error)

    def _tensor(self, work: _Work, new: TensorEntry, old: TensorEntry) -> None:
        """Count what changed, and store a delta if it is wanted and smaller. Raises `OSError` for a full disk."""
        itemsize = GRAIN.get(new.dtype, 1)
        try:
            before, after = self._mapped(old), self._mapped(new)
        except (MissingBlob, BadBlob) as error:  # collected meanwhile, or damaged
            work.problem(str(error))
            return
        made = encode(before, after, itemsize, (old.digest, new.digest)) if self._lacking(work, new) else None
        work.elements += changed(before, after, itemsize) if made is None else made.header.changed
        if made is None:
            return
        with self._lock:
            self._spare.add(hashlib.sha256(made.data).hexdigest())
        blob = self._store.put(made.data)
        nbytes = len(made.data)
        work.deltas[new.digest] = DeltaEntry(
            new=new.digest, old=old.digest, blob=blob, nbytes=nbytes, itemsize=itemsize
        )

    def _lacking(self, work: _Work, new: TensorEntry) -> bool:
        return self._wanted and new.digest in work.lacking and new.digest not in work.deltas

    def _mapped(self, entry: TensorEntry) -> memoryview:
        """The tensor's bytes, unhashed: a delta between others is one that `delta.apply` refuses."""
        found = self._store.mapped(entry.digest)
        if found.nbytes != entry.nbytes:
            raise BadBlob(f"blob {entry.digest} has {found.nbytes} bytes and not {entry.nbytes}")
        return found

    def _index(self, work: _Work) -> bool:
        """Write the index, an empty one too: who waits for it learns that there is no more to come."""
        work.at = "the index"
        index = DeltaIndex(
            job=self._job,
            version=work.manifest.version,
            manifest=work.manifest.digest(),
            before=None if work.before is None else work.before.version,
            deltas=tuple(sorted(work.deltas.values(), key=lambda entry: entry.new)),
        )
        try:
            self._store.write_index(index, sign_index(index, self._key))
        except (MissingManifest, MissingBlob) as error:  # retired meanwhile
            work.problem(str(error))
            return False
        return True


class _Work:
    """One comparison as it goes."""

    def __init__(self, manifest: VersionManifest, before: VersionManifest | None, problem: str) -> None:
        self.manifest, self.before = manifest, before
        self.at = ""  # what is compared or written
        self.problems = [problem] if problem else []
        self.exact = before is not None  # every pair was compared
        self.elements = 0  # that changed
        self.deltas: dict[str, DeltaEntry] = {}  # by the content that they make
        self._old = {} if before is None else {tensor.name: tensor for tensor in before.tensors}
        held = {tensor.digest for tensor in self._old.values()}
        self.lacking = {t.digest: t for t in manifest.tensors if t.digest not in held}

    def pairs(self) -> Iterator[tuple[TensorEntry, TensorEntry]]:
        """Tensors that are not what they were, each with the one of that name and size before."""
        for new in self.manifest.tensors if self.before is not None else ():
            old = self._old.get(new.name)
            self.at = f"tensor {new.name}"
            if old is None or old.nbytes != new.nbytes:
                self.elements += new.nbytes // GRAIN.get(new.dtype, 1)
            elif old.digest != new.digest:
                yield new, old

    def problem(self, story: str) -> None:
        self.exact = False
        self.problems.append(f"{self.at}: {story}")

    def told(self, indexed: bool) -> Compared:
        """What the record is to say."""
        every = sum(t.nbytes // GRAIN.get(t.dtype, 1) for t in self.manifest.tensors)
        lacking = self.lacking.values()
        sent = sum(self.deltas[t.digest].nbytes if t.digest in self.deltas else t.nbytes for t in lacking)
        return Compared(
            version=self.manifest.version,
            before=None if self.before is None else self.before.version,
            changed_bytes=None if self.before is None else sum(t.nbytes for t in lacking),
            changed_share=self.elements / every if self.exact and every else None,
            delta_bytes=sent if indexed and self.before is not None else None,
            indexed=indexed,
            problems=tuple(self.problems),
        )

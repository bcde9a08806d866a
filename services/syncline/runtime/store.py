"""The content-addressed store of a job's versions: `blobs/<sha256>`, `manifests/<epoch>.<number>.json`, and beside a
manifest there may be `deltas/<epoch>.<number>.json`, the index of its deltas, whose blobs lie with the others.

A blob is immutable and named by the sha256 of its bytes, so equal tensors of two versions are one file and
a reader can check what it got. A blob or manifest appears whole or not at all: written beside its place,
fsynced, then renamed. Sync is the one writer; rollout workers and the gateway read.

`collect` and writers exclude one another through a file lock (released by the kernel when a process dies).
A writer of many blobs wraps them and their manifest in `hold()`: no blob of it is collected in between, and they are
fsynced together before the manifest that names them, not one by one.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from syncline.contract.deltas import BadIndex, DeltaIndex, SignedIndex, decoded_index
from syncline.contract.version_path import (
    BadManifest,
    SignedManifest,
    VersionId,
    VersionManifest,
    parse_version,
)
from syncline.runtime.blob_files import holds, removed, sync_files, written
from syncline.runtime.durable import sync_folder

_DIGEST = re.compile(r"[0-9a-f]{64}")
Buffer = bytes | bytearray | memoryview

_MAP_FROM = 65536  # bytes; smaller blobs are read, larger ones mapped


class BadBlob(ValueError):
    """A blob whose bytes do not have the digest that names it."""


class MissingBlob(LookupError):
    """A digest that the store does not hold."""


class MissingManifest(LookupError):
    """A version that the store has no manifest of."""


class ManifestConflict(ValueError):
    """A second, different manifest under a version that has one."""


class StoreHeld(RuntimeError):
    """`collect` inside this process's own `hold()`: it would wait for itself."""


class BlobStore:
    """Blobs and manifests below `root` (created if absent). Safe for threads and processes on one host."""

    def __init__(self, root: Path) -> None:
        self._blobs = root / "blobs"
        self._blobs_folder = os.path.join(self._blobs, "")
        self._manifests = root / "manifests"
        self._indexes = root / "deltas"
        self._lock = root / "lock"
        self._holds = 0
        self._loose: set[str] = set()  # added inside `hold()`, not yet brought to the disk
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._manifests.mkdir(exist_ok=True)
        self._indexes.mkdir(exist_ok=True)

    # ---- blobs ----
    def path(self, digest: str) -> Path:
        """Where the blob named `digest` lies. Raises `ValueError` unless it is 64 lower-case hex digits."""
        if not _DIGEST.fullmatch(digest):
            raise _no_digest(digest)
        return self._blobs / digest

    def has(self, digest: str) -> bool:
        """Whether a blob of that name is there (its bytes are checked by `read`)."""
        return self.path(digest).is_file()

    def put(self, data: Buffer) -> str:
        """`add` without the news: the digest of `data`, which is in the store afterwards."""
        return self.add(data)[0]

    def add(self, data: Buffer) -> tuple[str, bool]:
        """Store C-contiguous `data`: its digest, and whether the store did not hold it before. On disk when this
        returns, or inside `hold()` before any manifest or index that names it.

        Equal bytes are stored once; a damaged copy is replaced. Raises `OSError` (disk full, no permission);
        then nothing of the blob is left behind.
        """
        view = memoryview(data)
        # a view with a zero in its shape has no cast
        raw = view.cast("B") if view.nbytes else memoryview(b"")
        digest = hashlib.sha256(raw).hexdigest()
        target = self.path(digest)
        with self._locked(fcntl.LOCK_SH):
            new = not holds(target, raw)
            if new:
                os.replace(written(self._blobs, raw, fsync=not self._holds), target)
            if self._holds:
                self._loose.add(
                    digest
                )  # also one that is there: whoever wrote it may have died before its fsync
            elif not new:
                sync_files([target])
        return digest, new

    def read(self, digest: str) -> memoryview:
        """The blob's bytes, checked against `digest`: a private view (writing to it changes no file).

        Blobs of 64 KiB or more are memory-mapped, not copied. Raises `MissingBlob`, `BadBlob`.
        """
        view = self.mapped(digest)
        found = hashlib.sha256(view).hexdigest()
        if found != digest:
            raise BadBlob(f"blob {digest} holds bytes with digest {found}")
        return view

    def mapped(self, digest: str) -> memoryview:
        """`read` without the check, for one who hashes what became of the bytes. Raises `MissingBlob`."""
        descriptor = self.descriptor(digest)
        try:
            if os.fstat(descriptor).st_size < _MAP_FROM:
                with open(descriptor, "rb", closefd=False) as file:
                    return memoryview(bytearray(file.read()))
            return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(descriptor)

    def descriptor(self, digest: str) -> int:
        """The blob's file, open for reading: the caller hashes what it reads, and closes. Raises `MissingBlob`."""
        if not _DIGEST.fullmatch(digest):
            raise _no_digest(digest)
        try:
            # a string: to make a path takes longer than to open the file
            return os.open(f"{self._blobs_folder}{digest}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingBlob(f"the store has no blob {digest}") from None

    # ---- manifests ----
    def write_manifest(self, signed: SignedManifest) -> None:
        """Publish a signed manifest; the same one again changes nothing.

        Raises `ManifestConflict` if the version has another one, `MissingBlob` (naming the tensor) if a
        tensor's blob is not there, `BadManifest` if the bytes are no manifest.
        """
        manifest = _decoded(signed)
        for tensor in manifest.tensors:
            if not self.has(tensor.digest):
                raise MissingBlob(f"version {manifest.version}: no blob {tensor.digest} of {tensor.name}")
        target = self._manifest_path(manifest.version)
        with self._locked(fcntl.LOCK_SH):
            self._settle()
            temporary = written(self._manifests, memoryview(msgspec.json.encode(signed)))
            try:
                os.link(temporary, target)  # unlike a rename, never replaces
            except FileExistsError:
                if self.read_manifest(manifest.version) != signed:
                    raise ManifestConflict(
                        f"version {manifest.version} has another manifest already"
                    ) from None
            finally:
                temporary.unlink()
            sync_folder(self._manifests)

    def read_manifest(self, version: VersionId) -> SignedManifest:
        """The signed manifest of `version`; open it with `version_path.opened`.

        Raises `MissingManifest`, and `BadManifest` for a file that is no signed manifest.
        """
        try:
            raw = self._manifest_path(version).read_bytes()
        except FileNotFoundError:
            raise MissingManifest(f"the store has no manifest of version {version}") from None
        try:
            return msgspec.json.decode(raw, type=SignedManifest)
        except msgspec.MsgspecError as error:
            raise BadManifest(f"manifest file of version {version}: {error}") from None

    def manifests(self) -> list[VersionId]:
        """Versions that have a manifest, oldest first."""
        return sorted(parse_version(path.stem) for path in self._manifests.glob("*.json"))

    # ---- deltas ----
    def write_index(self, index: DeltaIndex, signed: SignedIndex) -> None:
        """Put `signed`, the index inside it, beside its version's manifest; one that is there is replaced.

        Raises `MissingManifest` if the version was collected, `MissingBlob` if a delta was, `OSError`.
        """
        with self._locked(fcntl.LOCK_SH):
            if not self._manifest_path(index.version).is_file():
                raise MissingManifest(f"the store has no manifest of version {index.version}")
            for entry in index.deltas:
                if not self.has(entry.blob):
                    raise MissingBlob(f"deltas of version {index.version}: no blob {entry.blob}")
            self._settle()
            raw = memoryview(msgspec.json.encode(signed))
            os.replace(written(self._indexes, raw), self.index_path(index.version))

    def read_index(self, version: VersionId) -> SignedIndex | None:
        """The signed index of `version`; None: there is none (yet). Raises `BadIndex` for what is no index."""
        try:
            return decoded_index(self.index_path(version).read_bytes())
        except FileNotFoundError:
            return None

    def index_path(self, version: VersionId) -> Path:
        """Where the index of `version` lies, if it has one."""
        return self._indexes / f"{int(version.epoch)}.{int(version.number)}.json"

    def collect(self, keep: set[VersionId], spare: Callable[[], Collection[str]] = tuple) -> int:
        """Delete manifests of versions outside `keep`, blobs nothing names, leftovers of dead writers.

        An index goes with its manifest, or at once if it cannot be read. `spare`, asked while nobody writes: blobs
        that a writer in this process is about to name. Returns the bytes freed. Waits for writers elsewhere. Raises
        `BadManifest`, with no blob deleted, if a kept manifest cannot be read; `StoreHeld` inside one's own `hold()`.
        """
        if self._holds:
            raise StoreHeld("collect was called inside hold()")
        freed = 0
        with self._locked(fcntl.LOCK_EX):
            for version in self.manifests():
                if version not in keep:
                    freed += removed(self._manifest_path(version))
            named: set[str] = set(spare())
            for version in self.manifests():
                named.update(tensor.digest for tensor in _decoded(self.read_manifest(version)).tensors)
            for path in self._indexes.iterdir():
                deltas = _deltas(path) if (self._manifests / path.name).is_file() else None
                named.update(deltas or ())
                freed += removed(path) if deltas is None else 0
            for path in self._blobs.iterdir():
                if path.name not in named:
                    freed += removed(path)
            for path in self._manifests.glob("*.tmp"):
                freed += removed(path)
        return freed

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While open, no `collect` runs in any process: blobs put inside live on to their manifest."""
        with self._locked(fcntl.LOCK_SH):
            self._holds += 1
            try:
                yield
                self._settle()
            finally:
                self._holds -= 1

    def _settle(self) -> None:
        """Bring to the disk what was added inside `hold()` and is not known to be there, and its names."""
        loose = set(self._loose)
        if loose:
            sync_files(self.path(digest) for digest in loose)
            sync_folder(self._blobs)
            self._loose -= loose

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        # each use opens the file anew: a flock belongs to the open file, so threads exclude one another too
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)

    def _manifest_path(self, version: VersionId) -> Path:
        return self._manifests / f"{int(version.epoch)}.{int(version.number)}.json"


def _no_digest(digest: str) -> ValueError:
    return ValueError(f"blob digest {digest!r} is not 64 lower-case hex digits")


def _decoded(signed: SignedManifest) -> VersionManifest:
    """The manifest inside, signature unchecked: the store holds no key and only needs to know the blobs."""
    try:
        return msgspec.json.decode(signed.manifest, type=VersionManifest)
    except msgspec.MsgspecError as error:
        raise BadManifest(f"manifest: {error}") from None


def _deltas(path: Path) -> list[str] | None:
    """The blobs that an index names, signature unchecked; None: it cannot be read."""
    try:
        index = msgspec.json.decode(decoded_index(path.read_bytes()).index, type=DeltaIndex)
    except (BadIndex, msgspec.MsgspecError):
        return None
    return [entry.blob for entry in index.deltas]

"""Kind `objects`: a place that fsspec knows by address, S3 and whatever else; sync uploads, workers read ranges.

    <url>/<job>/blobs/<sha256>                   as in the job's store
    <url>/<job>/manifests/<epoch>.<number>.json  written after all of its blobs
    <url>/<job>/deltas/<epoch>.<number>.json

Sync uploads what is not there in its length, and deletes what its own store has dropped. Nothing is believed because it
lies there: workers hash what they read, and a manifest is signed. Access is given as fsspec and the store's own library
take it, from the environment (`AWS_ACCESS_KEY_ID`, `FSSPEC_S3`); never from a job's spec.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import msgspec

from syncline.contract.deltas import BadIndex
from syncline.contract.version_path import BadManifest, SignedManifest, VersionId
from syncline.runtime.store import BlobStore, MissingManifest
from syncline.transport.offered import Offered
from syncline.transport.transport import Deadline, Into, NotOfferable, NotOffered, WrongLength

_S3: dict[str, Any] = {  # the puller tries again by itself, with the deadline in view
    "config_kwargs": {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 1}},
}
_LOG = logging.getLogger("syncline.transport")


class Place:
    """The folder of one job at an address. Raises `ValueError` for an address that fsspec does not know."""

    def __init__(self, url: str, job: str) -> None:
        s3 = url.startswith(("s3://", "s3a://"))
        more = _S3 if s3 else {}
        try:
            self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **more)
        except (ValueError, ImportError) as error:
            raise ValueError(f"transfer.url {url!r}: {error}") from error
        self.root = f"{root.rstrip('/')}/{job}"
        self._errors: tuple[type[Exception], ...] = (OSError,)
        if s3:
            from botocore.exceptions import BotoCoreError  # s3fs lets those of the connection through

            self._errors = (OSError, BotoCoreError)

    @contextmanager
    def trouble(self) -> Iterator[None]:
        """Everything that fails of the place inside fails as `OSError`."""
        try:
            yield
        except FileNotFoundError:
            raise
        except self._errors as error:
            raise OSError(f"{self.root}: {error}") from error

    def sizes(self, folder: str) -> dict[str, int]:
        """Name -> bytes of what lies in `folder`."""
        with self.trouble():
            try:
                found = self.fs.ls(f"{self.root}/{folder}", detail=True)
            except FileNotFoundError:
                return {}
        return {item["name"].rpartition("/")[2]: item["size"] for item in found if item["type"] == "file"}


# ---- sync
class ObjectsOffering:
    """Keeps the place as the job's store is."""

    def __init__(self, store: BlobStore, url: str, job: str) -> None:
        self._offered, self._place = Offered(store), Place(url, job)

    def offer(self, version: VersionId) -> None:
        place = self._place
        try:
            there = place.sizes("blobs")
            with place.trouble():
                for folder in ("blobs", "manifests", "deltas"):
                    place.fs.makedirs(f"{place.root}/{folder}", exist_ok=True)
                for digest, nbytes in self._offered.named(version).items():
                    if there.get(digest) != nbytes:
                        source = str(self._offered.store.path(digest))
                        place.fs.put_file(source, f"{place.root}/blobs/{digest}")
                body = self._offered.manifest(str(version))
                index = self._offered.extra(f"deltas/{version}.json")
                for folder, content in (("deltas", index), ("manifests", body)):
                    if content is not None:
                        place.fs.pipe_file(f"{place.root}/{folder}/{version}.json", content)
        except (OSError, MissingManifest, BadIndex, msgspec.MsgspecError) as error:
            raise NotOfferable(f"version {version} cannot be uploaded: {error}") from error

    def source(self, version: VersionId, workers: tuple[str, ...], seq: int) -> str:
        return ""

    def retire(self) -> None:
        place, live = self._place, self._offered.versions()
        try:
            named = {digest for version in live for digest in self._offered.named(version)}
            files = {f"{version}.json" for version in live}
            for folder, keep in (("manifests", files), ("deltas", files), ("blobs", named)):
                gone = [f"{place.root}/{folder}/{name}" for name in place.sizes(folder) if name not in keep]
                with place.trouble():
                    for path in gone:
                        place.fs.rm_file(path)
        except (OSError, MissingManifest, BadIndex, msgspec.MsgspecError) as error:
            _LOG.error(
                "not all that was dropped is deleted: %s", error
            )  # the next time looks at everything again

    def close(self) -> None:
        """Nothing is open."""


# ---- worker
class ObjectsFetch:
    """See `transport.Fetch`. `bucket`: bytes of one range."""

    kind = "objects"

    def __init__(self, url: str, job: str, bucket: int) -> None:
        self._place, self._bucket = Place(url, job), bucket

    def seek(self, source: str) -> None:
        """The spec says where."""

    def manifest(self, version: VersionId, until: Deadline) -> SignedManifest:
        try:
            return msgspec.json.decode(self._whole(f"manifests/{version}.json", until), type=SignedManifest)
        except msgspec.MsgspecError as error:
            raise BadManifest(f"what lies at {self._place.root} is no manifest: {error}") from None

    def extra(self, name: str, until: Deadline) -> bytes:
        return self._whole(name, until)

    def blob(self, into: Into, until: Deadline) -> None:
        path = f"{self._place.root}/blobs/{into.digest}"
        with self._offered(path), self._place.trouble():
            total = int(self._place.fs.info(path)["size"])
            if total != into.nbytes:
                raise WrongLength(f"blob {into.digest} has {total} bytes, the manifest says {into.nbytes}")
            while into.held < into.nbytes:
                until.left()
                end = min(into.held + self._bucket, into.nbytes)
                data = self._place.fs.cat_file(path, start=into.held, end=end)
                if not data:
                    raise ConnectionError("an empty range")
                into.write(memoryview(data))

    def done(self) -> None:
        """Nobody waits."""

    def interrupt(self) -> None:
        """A range ends by itself."""

    def close(self) -> None:
        """Nothing is open."""

    def _whole(self, name: str, until: Deadline) -> bytes:
        until.left()
        path = f"{self._place.root}/{name}"
        with self._offered(path), self._place.trouble():
            body: bytes = self._place.fs.cat_file(path)
        return body

    @contextmanager
    def _offered(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise NotOffered(f"there is no {path}") from None

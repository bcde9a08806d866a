"""What sync offers: exactly what live manifests, and the indices of their deltas, name. By digest and version alone."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import msgspec

from syncline.contract.deltas import BadIndex, DeltaIndex
from syncline.contract.version_path import VersionId, VersionManifest, parse_version
from syncline.runtime.store import BlobStore

EXTRA = re.compile(r"deltas/([0-9]{1,9}\.[0-9]{1,9})\.json")
"""Names of files beside the manifests."""
_LOG = logging.getLogger("syncline.transport")


class Offered:
    """Looks into the job's store. For many threads."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._named: dict[VersionId, set[str]] = {}

    def versions(self) -> list[VersionId]:
        """Live ones, oldest first."""
        return self.store.manifests()

    def named(self, version: VersionId) -> dict[str, int]:
        """Digest -> bytes of each blob that the version names: tensors, and deltas that its index has by now.

        An index that cannot be read names nothing. Raises `MissingManifest`, `BadManifest`.
        """
        manifest = msgspec.json.decode(self.store.read_manifest(version).manifest, type=VersionManifest)
        named = {tensor.digest: tensor.nbytes for tensor in manifest.tensors}
        try:
            signed = self.store.read_index(version)
            deltas = msgspec.json.decode(signed.index, type=DeltaIndex).deltas if signed is not None else ()
        except (BadIndex, msgspec.MsgspecError):
            deltas = ()
        return named | {entry.blob: entry.nbytes for entry in deltas}

    def blob(self, digest: str) -> Path | None:
        """The file of a blob that something live names; None: nothing does."""
        with self._lock:
            live = self.store.manifests()
            for gone in self._named.keys() - set(live):
                del self._named[gone]
            if not any(digest in named for named in self._named.values()):
                # what came since, or an index that is newer than the last look
                self._named = {version: set(self.named(version)) for version in live}
            if not any(digest in named for named in self._named.values()):
                return None
        return self.store.path(digest)

    def manifest(self, text: str) -> bytes | None:
        """The signed manifest of the version `text`, as JSON; None: there is none."""
        try:
            version = parse_version(text)
        except ValueError:
            return None
        if version not in self.store.manifests():
            return None
        return msgspec.json.encode(self.store.read_manifest(version))

    def extra(self, name: str) -> bytes | None:
        """The file `name` beside the manifests; None: there is none, or the name is no such file's."""
        matched = EXTRA.fullmatch(name)
        if matched is None:
            return None
        try:
            signed = self.store.read_index(parse_version(matched[1]))
        except BadIndex as error:
            _LOG.warning("%s: %s", name, error)
            return None
        return None if signed is None else msgspec.json.encode(signed)

"""Versions of another job, as they lie in its store: an evaluation gives them to workers and makes none."""

from __future__ import annotations

from syncline.contract.version_path import BadManifest, Minted, VersionManifest, VersionRecord
from syncline.runtime.store import MissingManifest
from syncline.sync.publish import Publisher, Unpublishable


class Pinned(Publisher):
    """Publishes what was published before, and nothing else. `job`, `run` and `key` are the other job's."""

    borrowed = True

    def publish(self, minted: Minted, record: VersionRecord, *, proven: bool = True) -> VersionManifest:
        """The manifest, as its own job signed it. Raises `Unpublishable` if it is gone or not to be trusted."""
        try:
            manifest = self.published(minted)
        except (BadManifest, MissingManifest, OSError) as error:
            raise Unpublishable(str(error)) from error
        if manifest is None:
            raise Unpublishable(f"job {self._job} no longer has version {minted.version}")
        if manifest.contract != self.contract.digest():
            raise Unpublishable(f"signed under contract {manifest.contract}, not {self.contract.digest()}")
        return manifest

    def drop_export(self, minted: Minted) -> None:
        """There is none."""

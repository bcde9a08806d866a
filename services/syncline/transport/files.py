"""Kind `files`: workers see the job's run folder. Nothing moves; engines read blobs where sync wrote them."""

from __future__ import annotations

import time

from syncline.contract.pulled import Pulled
from syncline.contract.version_path import SignedManifest, SyncOrder, VersionId, opened
from syncline.runtime.store import BlobStore
from syncline.transport.transport import Damaged


class SharedFiles:
    """Both sides: `Offering` and `Pulling`."""

    def __init__(self, store: BlobStore, key: bytes) -> None:
        self.store = store
        self._key = key

    # ---- sync
    def offer(self, version: VersionId) -> None:
        """It is where workers look."""

    def source(self, version: VersionId, workers: tuple[str, ...], seq: int) -> str:
        return ""

    def retire(self) -> None:
        """It is gone where workers looked."""

    # ---- worker
    def pull(self, order: SyncOrder, serving: VersionId | None) -> tuple[SignedManifest, Pulled]:
        began = time.monotonic()
        signed = self.store.read_manifest(order.version)
        manifest = opened(signed, self._key)
        if manifest.digest() != order.digest:
            raise Damaged(f"the store's manifest of {order.version} has digest {manifest.digest()}")
        return signed, Pulled(kind="files", seconds=time.monotonic() - began, held=manifest.nbytes())

    def supersede(self, seq: int) -> None:
        """A pull takes no time."""

    def doubt(self) -> None:
        """The store is sync's; engines hash what they read."""

    def close(self) -> None:
        """Nothing is open."""

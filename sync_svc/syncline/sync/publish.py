"""From a minted version to a signed manifest in the store: convert, build, sign, write. Safe to repeat."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import msgspec

from syncline.contract.plan import PrecisionPlan
from syncline.contract.precision import PrecisionContract
from syncline.contract.version_path import (
    CONVERTED,
    PUBLISHED,
    BadManifest,
    Minted,
    VersionManifest,
    VersionRecord,
    opened,
    sign,
)
from syncline.runtime.durable import write_whole
from syncline.runtime.store import BlobStore, ManifestConflict, MissingManifest
from syncline.runtime.tracing import hop
from syncline.sync.adapter import Base, base_of, convert_version
from syncline.sync.export import BadExport, Export, NonFinite
from syncline.sync.manifest import build

PLAN_FILE = "precision_plan.json"
"""The resolved plan in the job's run folder: per tensor its format, grouping and the reason."""


class Unpublishable(ValueError):
    """A version that cannot become a manifest; the message says why, for people."""


class Publisher:
    """Publishes versions of one job into `store`. `run` is the job's folder, `key` signs."""

    def __init__(
        self, job: str, run: Path, key: bytes, contract: PrecisionContract, store: BlobStore
    ) -> None:
        self._job, self._run, self._key = job, run, key
        self.contract = contract
        self.store = store

    def published(self, minted: Minted) -> VersionManifest | None:
        """The manifest of `minted`, if it was published before.

        Raises `BadManifest` if it was not signed with this job's key.
        """
        try:
            return opened(self.store.read_manifest(minted.version), self._key)
        except MissingManifest:
            return None

    def publish(self, minted: Minted, record: VersionRecord) -> VersionManifest:
        """Convert and publish, telling `record` of it. Raises `Unpublishable`."""
        if minted.job != self._job:
            raise Unpublishable(f"minted for job {minted.job}")
        if minted.contract != self.contract.digest():
            raise Unpublishable(
                f"minted under contract {minted.contract}, the job's is {self.contract.digest()}"
            )
        try:
            with self.store.hold():
                return self._publish(minted, record)
        except (BadExport, BadManifest, NonFinite, ManifestConflict, OSError) as error:
            raise Unpublishable(str(error)) from error

    def _publish(self, minted: Minted, record: VersionRecord) -> VersionManifest:
        job, version = self._job, minted.version
        with hop(CONVERTED, parent=minted.traceparent, job=job, version=version) as opened_hop:
            export = Export(self.export_of(minted), minted.files)
            try:
                done = convert_version(export, self.contract, self.store, self._base(minted))
            finally:
                export.close()
            opened_hop.set(
                representation=done.representation,
                bytes=done.nbytes,
                new_bytes=done.new_bytes,
                tensors=len(done.tensors),
            )
        record.state, record.converted = "converted", time.time()
        record.representation, record.nbytes, record.new_bytes = (
            done.representation,
            done.nbytes,
            done.new_bytes,
        )
        record.convert_trace = done.trace
        self._write_plan(done.plan)
        manifest = build(minted, done)
        with hop(PUBLISHED, parent=minted.traceparent, job=job, version=version, digest=manifest.digest()):
            self.store.write_manifest(sign(manifest, self._key))
        return manifest

    def _base(self, minted: Minted) -> Base | None:
        """What `minted` stands on, if its export is the adapter alone. Raises `BadExport`, `BadManifest`."""
        if minted.base is None:
            return None
        try:
            manifest = opened(self.store.read_manifest(minted.base), self._key)
            plan = msgspec.json.decode((self._run / PLAN_FILE).read_bytes(), type=PrecisionPlan)
        except MissingManifest:
            raise BadExport(f"version {minted.version}: its base {minted.base} was never published") from None
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise BadExport(f"version {minted.version}: {PLAN_FILE}: {error}") from None
        return base_of(manifest, plan, minted)

    def _write_plan(self, plan: PrecisionPlan) -> None:
        """Write the resolved plan for people and the gateway, once per job: it depends on names and shapes alone.

        Raises `Unpublishable` if this version's plan is not the one that the job began with.
        """
        target = self._run / PLAN_FILE
        body = msgspec.json.format(msgspec.json.encode(plan), indent=1)
        if target.is_file():
            if target.read_bytes() != body:
                raise Unpublishable(
                    f"the export's precision plan {plan.digest()} is not the job's: {PLAN_FILE}"
                )
            return
        write_whole(target, body)

    def export_of(self, minted: Minted) -> Path:
        """The export's folder. Raises `BadExport` if it is not one below the job's `export/`."""
        root = (self._run / "export").resolve()
        folder = (self._run / minted.artefact).resolve()
        if folder.parent != root:
            raise BadExport(f"artefact {minted.artefact!r} is no folder below export/")
        return folder

    def drop_export(self, minted: Minted) -> None:
        """Delete the trainer's export: the store has what matters."""
        try:
            shutil.rmtree(self.export_of(minted))
        except (BadExport, FileNotFoundError):
            return  # never ours to delete, or gone already

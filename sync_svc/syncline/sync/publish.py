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
from syncline.runtime.store import BlobStore, ManifestConflict, MissingBlob, MissingManifest
from syncline.runtime.tracing import hop
from syncline.sync.adapter import Base, base_of, convert_version
from syncline.sync.export import BadExport, Export, NonFinite
from syncline.sync.manifest import build
from syncline.sync.source import source_of

PLAN_FILE = "precision_plan.json"
"""The resolved plan in the job's run folder: per tensor its format, grouping and the reason."""
NAMED = 4  # tensors that a message names at most


class Unpublishable(ValueError):
    """A version that cannot become a manifest; the message says why, for people."""


class Publisher:
    """Publishes versions of one job into `store`. `run` is the job's folder, `key` signs."""

    borrowed = False  # the store is another job's: nothing is added to it and nothing deleted

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

    def publish(self, minted: Minted, record: VersionRecord, *, proven: bool = True) -> VersionManifest:
        """Convert and publish, telling `record` of it. Raises `Unpublishable`, naming file or tensor.

        proven   a version of the job was active: the plan that it was made by binds this one. Before that, a plan may
                 be of an export that no worker can load, and the next one takes its place
        """
        if minted.job != self._job:
            raise Unpublishable(f"minted for job {minted.job}")
        if minted.contract != self.contract.digest():
            raise Unpublishable(
                f"minted under contract {minted.contract}, the job's is {self.contract.digest()}"
            )
        try:
            with self.store.hold():
                return self._publish(minted, record, proven)
        except (BadExport, BadManifest, NonFinite, ManifestConflict, MissingBlob, OSError) as error:
            raise Unpublishable(str(error)) from error

    def _publish(self, minted: Minted, record: VersionRecord, proven: bool) -> VersionManifest:
        job, version = self._job, minted.version
        with hop(CONVERTED, parent=minted.traceparent, job=job, version=version) as opened_hop:
            export = Export(self.export_of(minted), minted.files)
            try:
                source = source_of(export, self.contract)
                done = convert_version(source, self.contract, self.store, self._base(minted))
                export.check_unchanged()
            finally:
                export.close()
            opened_hop.set(
                representation=done.representation,
                place=done.trace.place,
                ranks=source.ranks,
                gather_ms=1e3 * source.gather_seconds,
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
        self._write_plan(done.plan, proven)
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

    def _write_plan(self, plan: PrecisionPlan, proven: bool) -> None:
        """Write the resolved plan for people and the gateway, once per job: it depends on names and shapes alone.

        Raises `Unpublishable`, naming tensors, if this version's plan is not the one of versions that were active.
        """
        target = self._run / PLAN_FILE
        body = msgspec.json.format(msgspec.json.encode(plan), indent=1)
        known = target.read_bytes() if target.is_file() else b""
        if known and known != body and proven:
            story = _difference(known, plan)
            raise Unpublishable(f"the export's precision plan is not the job's: {PLAN_FILE}: {story}")
        if known != body:
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


def _difference(known: bytes, plan: PrecisionPlan) -> str:
    """In which tensors `plan` is not the job's, whose file holds `known`."""
    try:
        ours = {entry.name: entry for entry in msgspec.json.decode(known, type=PrecisionPlan).entries}
    except msgspec.MsgspecError as error:
        return f"the file is no plan: {error}"
    theirs = {entry.name: entry for entry in plan.entries}
    found = [f"tensor {name} is missing" for name in ours if name not in theirs]
    found += [f"tensor {name} is not one of the model's" for name in theirs if name not in ours]
    for name in ours.keys() & theirs.keys():
        if ours[name].shape != theirs[name].shape:
            wanted = list(ours[name].shape)
            found.append(f"tensor {name} has shape {list(theirs[name].shape)}, the plan says {wanted}")
        elif ours[name] != theirs[name]:
            found.append(f"tensor {name} is {theirs[name].reason}, the plan says {ours[name].reason}")
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return "; ".join(sorted(found)[:NAMED]) + more if found else "of another contract"

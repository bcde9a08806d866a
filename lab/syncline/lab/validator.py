"""`python -m syncline.lab.validator`: proves versions of one job on engines out of rotation, while the job runs.

Consumes:      `proofs` (`Wanted`, of sync's); manifests and blobs of the job's store.
Produces:      `Proof`s; a validation of level 6 for each version, on disk, with its spans in the version's trace.
Waits for:     a version that is wanted and has no proof.
Unblocked by:  sync, that publishes one.

Of several wanted versions the newest alone is proved: sync brings workers to no older one. One engine takes every
proven version in turn, as a worker does. What a killed process has not told, its successor tells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from syncline.contract.job import JobSpec
from syncline.contract.streams import JOB, PROOFS
from syncline.contract.validation import (
    FOLDER,
    Check,
    Level,
    Proof,
    Report,
    Result,
    ValidationRequest,
    Wanted,
)
from syncline.contract.validation_words import refusal
from syncline.contract.version_path import SignedManifest, VersionId, opened
from syncline.exporting.source import pin
from syncline.lab.ladder import version_level
from syncline.lab.ladder.climb import result_of
from syncline.lab.ladder.diagnosis import diagnose
from syncline.lab.pair import DRAIN, one_thread
from syncline.lab.validation import Tell, carry_out
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.runtime import validations
from syncline.runtime.bus import unpack
from syncline.runtime.service import ServiceContext, run
from syncline.runtime.store import BlobStore, MissingManifest

POLL = 1.0  # seconds after which a stop is looked for, though nothing arrived
KEPT = 100  # versions that held whose figures are kept
SIX: tuple[Level, ...] = (6,)


def main(context: ServiceContext) -> None:
    """Serve until told to stop."""
    validator = start(context)
    cursor, key = "0", PROOFS.at(context.job)
    while not context.stop_requested():
        context.ready(True)
        entries = context.bus.read({key: cursor}, POLL).get(key, [])
        for entry in entries:
            cursor = entry.id
            validator.hear(unpack(entry, Wanted | Proof))
        wanted = validator.due() if not entries else None  # once all is heard
        if wanted is not None:
            context.bus.append(key, validator.prove(wanted), cap=10_000)


def start(context: ServiceContext) -> Validator:
    """Take the lease and read what the job is."""
    context.lease("validator")
    raw = context.bus.hget(JOB.at(context.job), "spec")
    if raw is None:
        raise ValueError(f"job {context.job} has no spec")
    one_thread()
    folder = context.settings.job_dir(context.job)
    key = (folder / "key").read_bytes()
    home = version_level.Home(context.job, key, JobSpec.model_validate_json(raw), context.settings.models)
    return Validator(context, home, folder)


class Validator:
    """Proves versions of `home`'s job, whose folder is `folder`."""

    def __init__(self, context: ServiceContext, home: version_level.Home, folder: Path) -> None:
        self._context, self._home, self._folder = context, home, folder
        self._store = BlobStore(folder / "store")
        self._wanted: Wanted | None = None
        self._told: set[tuple[VersionId, str]] = set()
        self._warm: ReferenceEngine | None = None

    def hear(self, told: Wanted | Proof) -> None:
        """What stands in the stream."""
        if isinstance(told, Proof):
            self._told.add((told.version, told.digest))
        elif self._wanted is None or told.version >= self._wanted.version:
            self._wanted = told

    def due(self) -> Wanted | None:
        """The newest version that is wanted, if it has no proof yet."""
        wanted = self._wanted
        return None if wanted is None or (wanted.version, wanted.digest) in self._told else wanted

    def prove(self, wanted: Wanted) -> Proof:
        """Climb level 6 for a version. What cannot be climbed is no proof, and says why."""
        began = time.monotonic()
        self._told.add((wanted.version, wanted.digest))
        request = self._request(wanted)
        with validations.climbing(self._folder, request.number) as place:
            assert place is not None, "nobody else knows this number yet"

            def climb(_: JobSpec, scratch: Path, tell: Tell) -> Report:
                return self._report(wanted, scratch, tell)

            report = carry_out(request, self._context.settings, place, climb)
        evidence = f"{request.job}/{FOLDER}/{request.number}"
        holds = report.failed_at is None
        if not holds:
            self._warm = None  # it may hold anything now
        validations.prune(self._folder, KEPT)
        return Proof(
            version=wanted.version,
            digest=wanted.digest,
            holds=holds,
            reason="" if holds else refusal(report.results, report.diagnosis, evidence),
            number=request.number,
            seconds=time.monotonic() - began,
        )

    def _request(self, wanted: Wanted) -> ValidationRequest:
        return validations.begin(
            self._folder,
            lambda number: ValidationRequest(
                job=self._home.job,
                number=number,
                levels=SIX,
                why="before_active",
                spec=self._home.spec.canonical(),
                at=time.time(),
                version=str(wanted.version),
                traceparent=wanted.traceparent,
            ),
        )

    def _report(self, wanted: Wanted, scratch: Path, tell: Tell) -> Report:
        result: Result = result_of(6, lambda: self._checks(wanted, scratch))
        tell(result)
        spec = self._home.spec
        return Report(
            recipe=spec.precision.recipe or "custom",
            model=spec.model.name,
            contract=spec.contract_digest(),
            seed=spec.seeds.model,
            results=(result,),
            diagnosis=diagnose([result]),
        )

    def _checks(self, wanted: Wanted, scratch: Path) -> Iterator[Check]:
        """Level 6 on blobs that a collecting sync cannot take away meanwhile."""
        home, warm = self._home, self._warmed(wanted.before)
        signed = self._manifest(wanted.version)
        own = pin(self._store, opened(signed, home.key), scratch / "store")
        version = version_level.Version(signed, wanted.digest, wanted.canaries, wanted.tolerance, own)
        (scratch / "level").mkdir()
        yield from version_level.checks(version, home, warm, scratch / "level")

    def _warmed(self, before: VersionId | None) -> ReferenceEngine:
        """The engine that took every version in turn, or a new one with the active version alone."""
        warm = self._warm
        if warm is None:
            warm = self._home.engine()
            if before is not None:
                warm.stage(self._manifest(before), self._store)
                warm.commit(DRAIN)
        self._warm = warm
        return warm

    def _manifest(self, version: VersionId) -> SignedManifest:
        try:
            return self._store.read_manifest(version)
        except MissingManifest as error:
            raise ValueError(f"version {version}: {error}") from None


if __name__ == "__main__":
    run("validator", main)

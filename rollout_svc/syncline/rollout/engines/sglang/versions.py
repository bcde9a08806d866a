"""What the server holds: staging, committing and giving up versions of an engine with one buffer. See `engine`."""

from __future__ import annotations

import logging
import threading
import time

from syncline.contract.version_path import SignedManifest, VersionId, opened
from syncline.rollout.engine import CommitPolicy, Committed, OldVersion, Staged, StageFailed
from syncline.rollout.engines.sglang.client import Refused, ServerGone
from syncline.rollout.engines.sglang.flight import Serving
from syncline.rollout.engines.sglang.flights import Flights
from syncline.rollout.engines.sglang.launch import ServerProcess
from syncline.rollout.engines.sglang.loader import Loader, Prepared
from syncline.rollout.engines.sglang.model import Model
from syncline.runtime.store import BlobStore

_LOG = logging.getLogger("syncline.rollout")
POLICIES = ("drain", "in_place")
SETTLE = 600.0  # seconds that running requests may take to end before a version is loaded


class Versions:
    """The versions' part of `SGLangEngine`; see there for the arguments."""

    def __init__(
        self,
        model: Model,
        job: str,
        key: bytes,
        process: ServerProcess,
        loader: Loader,
        max_running: int,
        in_flight: CommitPolicy,
    ) -> None:
        self._model, self._job, self._key = model, job, key
        self.process, self._loader = process, loader
        self.in_flight = in_flight
        self._description = model.describe(max_running, process.plan.saves_memory)
        self._flights = Flights(model, max_running)
        self._lock = threading.RLock()
        self._active: Prepared | None = None
        self._staged: Prepared | None = None
        self._held: Prepared | None = None  # what the server's base weights are; None: not known
        self._closed_at: float | None = None  # monotonic: since when nothing samples because of a stage
        self._newest: VersionId | None = None
        self._asleep: SignedManifest | None = None
        self._signed: dict[VersionId, SignedManifest] = {}

    @property
    def serving(self) -> tuple[VersionId, str] | None:
        with self._lock:
            self._look()
            if self._active is None or not self._flights.open:
                return None
            return self._active.version, self._active.digest

    def _look(self) -> None:
        """Notice that the server's process ended: nothing serves then, and requests wait for the next version."""
        if self._held is not None and not self.process.alive:
            _LOG.warning("the SGLang server ended: out of rotation until a version is loaded into a new one")
            self._active = self._staged = self._held = None
            self._flights.close()

    # ---- versions
    def stage(self, signed: SignedManifest, store: BlobStore) -> Staged:
        started = time.monotonic()
        manifest = opened(signed, self._key)
        digest, version = manifest.digest(), manifest.version
        with self._lock:
            self._look()
            active = self._active
        if manifest.job != self._job:
            raise StageFailed(f"manifest of version {version} belongs to job {manifest.job}")
        if self._newest is not None and version < self._newest:
            raise OldVersion(f"version {version} is older than {self._newest}, which has served here")
        if active is not None and active.version == version and active.digest != digest:
            raise StageFailed(f"version {version} serves here with digest {active.digest}, not {digest}")
        prepared = self._standing(version, digest)
        if prepared is None:
            prepared = self._loader.prepare(manifest, store, self._held)
            self._signed[version] = signed
            self._take(prepared)
        same = active is not None and active.contents == prepared.contents
        return Staged(
            version=version,
            digest=digest,
            loaded_digest=prepared.loaded,
            nbytes=prepared.nbytes,
            seconds=time.monotonic() - started,
            verdict="verified, unchanged" if same else "verified",
        )

    def _standing(self, version: VersionId, digest: str) -> Prepared | None:
        """The version, if it serves or is staged and the server holds it."""
        for prepared in (self._staged, self._active):
            known = prepared is not None and (prepared.version, prepared.digest) == (version, digest)
            if known and self._held is not None and prepared is not None and self._held.base == prepared.base:
                return prepared
        return None

    def _take(self, prepared: Prepared) -> None:
        """Bring `prepared` into the server. On failure what served before serves again, if the server lives."""
        beside = self._held is not None and self._held.base == prepared.base and self._active is not None
        if beside and prepared.adapter is not None:
            try:
                self._loader.load_adapter(self.process.server, prepared)
            except (Refused, ServerGone) as error:
                raise StageFailed(f"adapter of version {prepared.version}: {error}") from None
            self._staged = prepared
            return
        self._settle()
        self._staged = None
        try:
            self.process.start()
            self.process.wait()
            self._held = None
            self._loader.load(self.process.server, prepared)
        except (StageFailed, Refused, ServerGone) as error:
            self._restore()
            raise StageFailed(f"version {prepared.version}: {error}") from None
        self._held = self._staged = prepared

    def _settle(self) -> None:
        """Nothing begins any more; what runs ends by itself or with what it has."""
        if self._closed_at is None:
            self._closed_at = time.monotonic()
        self._flights.close()
        if self.process.alive and self.in_flight.kind == "in_place":
            for rid in self._flights.end_all():
                self.process.server.abort(rid)
        if not self._flights.settled(SETTLE):
            self._open()
            raise StageFailed(f"requests did not end within {SETTLE:.0f} s")

    def _restore(self) -> None:
        """Load what served before again. Where that fails nothing serves, and the worker asks for a version."""
        old = self._active
        if old is None:
            return
        try:
            self._loader.load(self.process.server, old)
        except (StageFailed, Refused, ServerGone) as error:
            _LOG.warning("version %s could not be loaded again: %s", old.version, error)
            self._active = self._held = None
            return
        self._held = old
        self._open()

    def _open(self) -> None:
        self._closed_at = None
        if self._active is not None and self.process.alive:
            self._flights.reopen(serving_of(self._active))
            self._flights.send(self.process.server)

    def commit(self, policy: CommitPolicy) -> Committed | None:
        started = time.monotonic()
        with self._lock:
            staged = self._staged
            if staged is None:
                raise ValueError("there is no staged version to commit")
            if policy.kind not in POLICIES or policy.kv == "carried":
                kept = " with carried context" if policy.kv == "carried" else ""
                raise ValueError(
                    f"{policy.kind}{kept}: SGLang offers {', '.join(POLICIES)}, context recomputed"
                )
            running = self._flights.running
            if running and policy.kind != self.in_flight.kind:
                raise ValueError(f"{policy.kind}: this engine was made for {self.in_flight.kind}")
            if running and self._closed_at is None and not self._commit_beside(policy):
                return None
            self._active, self._staged, self._newest = staged, None, staged.version
            pause = time.monotonic() - (self._closed_at or started)
            self._open()
            self._loader.forget([staged])
        return Committed(
            version=staged.version, digest=staged.digest, pause=pause, in_flight=running, recomputed=running
        )

    def _commit_beside(self, policy: CommitPolicy) -> bool:
        """Whether requests under the old adapter allow a commit: in place they are ended, else they are waited for."""
        if policy.kind == "drain":
            self._flights.draining = True
            return False
        for rid in self._flights.end_all():
            self.process.server.abort(rid)
        return self._flights.settled(SETTLE)

    def abort_stage(self) -> None:
        with self._lock:
            staged, self._staged = self._staged, None
            self._flights.draining = False
            if self._closed_at is not None:
                self._restore()
            elif staged is not None and staged.adapter is not None:
                self.process.server.unload_adapter(staged.adapter[0])

    def _tidy(self) -> None:
        """Unload adapters that no version here has any more. Their requests have ended."""
        current = [
            p.adapter[0] for p in (self._active, self._staged) if p is not None and p.adapter is not None
        ]
        if not current or not self.process.alive:
            return
        for name in self._flights.used - {*current, *self._flights.adapters()}:
            self.process.server.unload_adapter(name)
            self._flights.used.discard(name)


def serving_of(version: Prepared) -> Serving:
    """What legs are sent under while `version` serves."""
    adapter = version.adapter[0] if version.adapter is not None else None
    return Serving(version.version, version.digest, version.label, adapter)

"""The SGLang engine: one server, one buffer.

The server holds one set of base weights, so `stage` takes it out of rotation: nothing begins, what runs ends (drain) or
is ended with what it has (in_place), the version is loaded, read back and scored, and `commit` opens again; requests
that were ended go on behind their own tokens under the new version. A stage that fails or is given up loads the old
one again. Adapters are held beside one another: a version that changes the adapter alone is staged while the old one
serves.

What the server attests about each token is what chunks are stamped with; a label that was never loaded is `Untrue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from syncline.contract.precision_trace import ComponentTrace
from syncline.contract.schemes import KvFormat
from syncline.contract.version_path import VersionId
from syncline.rollout.engine import Chunk, Description, Request, Score
from syncline.rollout.engines.sglang.scoring import check_scored, score
from syncline.rollout.engines.sglang.versions import Versions, serving_of
from syncline.runtime.store import BlobStore


class SGLangEngine(Versions):
    """See `RolloutEngine` and the module.

    model      the model under its contract
    job, key   job id and manifest key: manifests of another job or signature are refused
    process    the server; started when it is first needed
    loader     of versions into it
    in_flight  what `stage` does to requests that run, and so what `commit` must be asked for
    """

    # ---- what it is
    @property
    def staged(self) -> VersionId | None:
        return self._staged.version if self._staged else None

    @property
    def running(self) -> int:
        return self._flights.running

    @property
    def room(self) -> int:
        return 0 if self.serving is None or self._flights.draining else self._flights.room

    @property
    def sampled(self) -> int:
        return self._flights.sampled

    def describe(self) -> Description:
        return self._description

    # ---- requests
    def submit(self, request: Request) -> None:
        with self._lock:
            if self.serving is None:
                raise ValueError(f"trajectory {request.trajectory}: the engine holds no verified version")
            self._flights.add(request, self.room)
            self._flights.send(self.process.server)

    def step(self) -> list[Chunk]:
        landed = self._flights.land()
        with self._lock:
            self._look()
            if self._flights.open and self._active is not None:
                self._flights.send(self.process.server)
            self._tidy()
        return landed

    def abort(self, trajectory: str) -> bool:
        rid = self._flights.drop(trajectory)
        if rid and self.process.alive:
            self.process.server.abort(rid)
        return rid is not None

    # ---- scoring
    def score(
        self,
        ids: Sequence[int],
        prompt: int,
        *,
        buffer: Literal["active", "staged"],
        experts: bool = False,
        kv: KvFormat | None = None,
        temperature: float = 1.0,
        positions: Sequence[int] | None = None,
    ) -> Score:
        version = self._staged if buffer == "staged" else self._active
        if version is None:
            raise ValueError(f"there is no {buffer} version to score with")
        if self._held is None or self._held.base != version.base:
            raise ValueError(f"version {version.version}: the server's one buffer holds another version now")
        if not 0 < prompt < len(ids):
            raise ValueError(f"a prompt of {prompt} tokens leaves nothing to score of {len(ids)} ids")
        if kv not in (None, self._description.kv):
            raise ValueError(f"kv {kv!r}: the server stores {self._description.kv!r} and nothing else")
        at = range(prompt, len(ids)) if positions is None else positions
        check_scored(ids, self._model.vocab, temperature)
        return score(self.process.server, serving_of(version), ids, at, temperature, experts, self._model)

    def trace(self, buffer: Literal["active", "staged"]) -> ComponentTrace:
        version = self._staged if buffer == "staged" else self._active
        if version is None:
            raise ValueError(f"there is no {buffer} version to trace")
        return self._model.trace(version.contents.keys())

    def close(self) -> None:
        """End requests and the thread that holds them. The server goes on."""
        self._flights.close()
        rids = self._flights.end_all()
        if self.process.alive:
            for rid in rids:
                self.process.server.abort(rid)
        self._flights.settled(10.0)
        self._flights.close_pump()

    # ---- memory
    def sleep(self) -> None:
        if self.running:
            raise ValueError(f"{self.running} requests run: sleep is for an engine with nothing in flight")
        if self._staged is not None:
            self.abort_stage()
        with self._lock:
            if self._active is not None:
                self._asleep = self._signed[self._active.version]
            self._flights.close()
            self._active = self._staged = None
            if self.process.alive and self.process.plan.saves_memory:
                self._held = None
                self.process.server.release_memory()

    def wake(self, store: BlobStore) -> VersionId | None:
        if self._active is not None or self._asleep is None:
            self.process.start()
            return self.serving[0] if self.serving else None
        if self.process.alive and self.process.plan.saves_memory:
            self.process.server.resume_memory()
        self.stage(self._asleep, store)
        self.commit(self.in_flight)
        return self.serving[0] if self.serving else None

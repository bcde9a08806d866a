"""The reference rollout engine: any causal LM that `transformers` knows, in this process, on CPU.

A *lane* is a batch with its weights. New requests join the newest lane; an older lane, kept by
`continue_old`, only finishes what it has begun. At most two lanes exist, and beside them one staged set of
weights and one spare.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from syncline.contract.job import ModelSpec
from syncline.contract.precision import PrecisionContract
from syncline.contract.precision_trace import ComponentTrace
from syncline.contract.recipes import RECIPES
from syncline.contract.schemes import KvFormat
from syncline.contract.version_path import SignedManifest, VersionId, VersionManifest, loaded_digest, opened
from syncline.reference.model import ModelFolder, model_folder, stop_ids
from syncline.rollout.engine import (
    Chunk,
    CommitPolicy,
    Committed,
    Description,
    OldVersion,
    Request,
    Score,
    Staged,
    StageFailed,
)
from syncline.rollout.engines.batching import Batch
from syncline.rollout.engines.expected import described
from syncline.rollout.engines.kv import CacheBytes
from syncline.rollout.engines.scoring import prefill_score
from syncline.rollout.engines.traced import Context, context_of, rollout_trace
from syncline.rollout.engines.weights import Weights, loaders, release_memory
from syncline.runtime.store import BlobStore


class ReferenceEngine:
    """See `RolloutEngine`.

    models, spec   where the architecture comes from; its weights come from manifests alone
    job, key       job id and manifest key: manifests of another job or signature are refused
    max_running    requests decoded together
    contract       which weights are held in few bits, what multiplies them, how the attention context is stored
    kv             another storage of the context than the contract's
    """

    def __init__(
        self,
        models: Path,
        spec: ModelSpec,
        job: str,
        key: bytes,
        max_running: int,
        kv: KvFormat | None = None,
        contract: PrecisionContract = RECIPES["bf16"],
    ) -> None:
        self._folder: ModelFolder = model_folder(models, spec.name)
        self._job, self._key, self._max_running = job, key, max_running
        self._contract = contract
        self._kv: KvFormat = contract.rollout.kv_cache if kv is None else kv
        self._stop_ids = stop_ids(self._folder)
        self._config = self._folder.config.get_text_config(decoder=True)
        self._description, self._expected = described(self._folder, contract, self._kv, max_running)
        self._context: Context | None = None  # how it is stored, once measured
        self._lanes: list[Batch] = []  # oldest first; new requests join the last
        self._staged: Weights | None = None
        self._spares: list[Weights] = []  # kept until sleep: to free one would take as long as it is large
        self._draining = False
        self._closed: list[Chunk] = []  # spans closed by a commit, for the next step to hand out
        self._sampled = 0
        self._newest: VersionId | None = None  # highest version ever served
        self._asleep: SignedManifest | None = None  # what `wake` brings back
        release_memory()

    # ---- what it is
    @property
    def serving(self) -> tuple[VersionId, str] | None:
        return (self._lanes[-1].version, self._lanes[-1].weights.digest) if self._lanes else None

    @property
    def staged(self) -> VersionId | None:
        return self._staged.version if self._staged else None

    @property
    def running(self) -> int:
        return sum(lane.running for lane in self._lanes)

    @property
    def room(self) -> int:
        return 0 if self._draining or not self._lanes else self._max_running - self.running

    @property
    def sampled(self) -> int:
        return self._sampled

    def describe(self) -> Description:
        return self._description

    # ---- requests
    def submit(self, request: Request) -> None:
        if not self._lanes:
            raise ValueError(f"trajectory {request.trajectory}: the engine holds no verified version")
        if self.room < 1:
            raise ValueError(
                f"trajectory {request.trajectory}: no room ({self.running} of {self._max_running} run)"
            )
        if any(request.trajectory in lane.trajectories() for lane in self._lanes):
            raise ValueError(f"trajectory {request.trajectory} runs already")
        worst = max(request.prompt, default=-1)
        if not request.prompt or worst >= self._description.vocab or min(request.prompt) < 0:
            raise ValueError(
                f"trajectory {request.trajectory}: prompt is empty or has an id outside the vocabulary"
            )
        total = len(request.prompt) + request.sampling.max_tokens
        if total > self._config.max_position_embeddings:
            raise ValueError(
                f"trajectory {request.trajectory}: {len(request.prompt)} prompt tokens and {total} in all "
                f"exceed the model's {self._config.max_position_embeddings} positions"
            )
        self._lanes[-1].waiting.append(request)

    def step(self) -> list[Chunk]:
        chunks, self._closed = self._closed, []
        for lane in self._lanes:
            before = lane.sampled
            chunks.extend(lane.step())
            self._sampled += lane.sampled - before
        self._retire_lanes()
        return chunks

    def abort(self, trajectory: str) -> bool:
        self._closed = [chunk for chunk in self._closed if chunk.trajectory != trajectory]
        found = any(lane.drop(trajectory) for lane in self._lanes)
        self._retire_lanes()
        return found

    def _retire_lanes(self) -> None:
        for lane in self._lanes[:-1]:
            if lane.running == 0:
                self._spares.append(lane.weights)
                self._lanes.remove(lane)

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
        weights = self._staged if buffer == "staged" else self._active()
        if weights is None:
            raise ValueError(f"there is no {buffer} version to score with")
        if not 0 < prompt < len(ids):
            raise ValueError(f"a prompt of {prompt} tokens leaves nothing to score of {len(ids)} ids")
        at = range(prompt, len(ids)) if positions is None else positions
        return prefill_score(weights, ids, at, temperature=temperature, experts=experts, kv=kv or self._kv)

    def trace(self, buffer: Literal["active", "staged"]) -> ComponentTrace:
        weights = self._staged if buffer == "staged" else self._active()
        if weights is None:
            raise ValueError(f"there is no {buffer} version to trace")
        self._context = self._context or context_of(weights.model, self._kv)
        return rollout_trace(weights, self._context)

    # ---- versions
    def stage(self, signed: SignedManifest, store: BlobStore) -> Staged:
        started = time.monotonic()
        manifest = opened(signed, self._key)
        digest, active = manifest.digest(), self._active()
        if manifest.job != self._job:
            raise StageFailed(f"manifest of version {manifest.version} belongs to job {manifest.job}")
        if self._newest is not None and manifest.version < self._newest:
            raise OldVersion(
                f"version {manifest.version} is older than {self._newest}, which has served here"
            )
        if active is not None and active.version == manifest.version and active.digest != digest:
            raise StageFailed(
                f"version {manifest.version} serves here with digest {active.digest}, not {digest}"
            )
        loaded = loaded_digest(manifest.tensors)
        held = [
            w for w in (active, self._staged) if w and (w.version, w.digest) == (manifest.version, digest)
        ]
        if not held:
            self._expected.check(manifest)
            loaded = self._load(signed, manifest, store)
        fresh = held[0] if held else self._staged
        same = active is not None and fresh is not None and active.contents == fresh.contents
        return Staged(
            version=manifest.version,
            digest=digest,
            loaded_digest=loaded,
            nbytes=manifest.nbytes(),
            seconds=time.monotonic() - started,
            verdict="verified, unchanged" if same else "verified",
        )

    def _load(self, signed: SignedManifest, manifest: VersionManifest, store: BlobStore) -> str:
        # lanes may retire meanwhile, so what is loaded is nobody's until it is whole
        weights, self._staged = self._staged, None
        if weights is None:
            weights = self._spares.pop() if self._spares else Weights(self._expected)
        try:
            loaded = weights.load(signed, manifest, store, loaders(serving=self.running > 0))
            self._staged = weights
        finally:
            if self._staged is None:
                self._spares.append(weights)
        return loaded

    @property
    def _spare(self) -> Weights | None:
        """The buffer that is loaded next, unless one is staged."""
        return self._spares[-1] if self._spares else None

    def commit(self, policy: CommitPolicy) -> Committed | None:
        started = time.monotonic()
        weights = self._staged
        if weights is None or weights.version is None:
            raise ValueError("there is no staged version to commit")
        in_flight, recomputed, refilled = self.running, 0, 0.0
        if in_flight and policy.kind == "drain":
            self._draining = True
            return None
        if policy.kind == "continue_old" and sum(lane.running > 0 for lane in self._lanes) > 1:
            return None
        if in_flight and policy.kind == "in_place":
            recomputed, refilled = self._swap_in_place(weights, policy)
        else:
            self._lanes.append(Batch(weights, self._stop_ids, self._max_running, self._kv))
            self._retire_lanes()
        self._staged, self._draining, self._newest = None, False, weights.version
        return Committed(
            version=weights.version,
            digest=weights.digest,
            pause=time.monotonic() - started,
            in_flight=in_flight,
            recomputed=recomputed,
            refilled=refilled,
        )

    def _swap_in_place(self, weights: Weights, policy: CommitPolicy) -> tuple[int, float]:
        """Every running request goes on under `weights`. Returns how many contexts were made anew, and the seconds."""
        if len(self._lanes) > 1:
            raise ValueError(
                "in_place needs one batch, and an older version still has requests (continue_old)"
            )
        lane = self._lanes[0]
        old = lane.weights
        chunks, recomputed = lane.adopt(weights, policy.carried_age if policy.kv == "carried" else None)
        self._closed.extend(chunks)
        self._spares.append(old)
        return recomputed, lane.refilled

    def abort_stage(self) -> None:
        if self._staged is not None:
            self._spares.append(self._staged)
            self._staged = None
        self._draining = False

    def _active(self) -> Weights | None:
        return self._lanes[-1].weights if self._lanes else None

    # ---- memory
    def cache_bytes(self) -> CacheBytes:
        """Bytes allocated for the state of requests, by kind."""
        return sum((lane.cache_bytes() for lane in self._lanes), start=CacheBytes())

    def sleep(self) -> None:
        if self.running:
            raise ValueError(f"{self.running} requests run: sleep is for an engine with nothing in flight")
        active = self._active()
        if active is not None:
            self._asleep = active.signed
        self._lanes, self._staged, self._spares, self._draining = [], None, [], False
        del active
        release_memory()

    def wake(self, store: BlobStore) -> VersionId | None:
        if self._lanes or self._asleep is None:
            return self.serving[0] if self.serving else None
        self.stage(self._asleep, store)
        self.commit(CommitPolicy(kind="drain"))
        return self.serving[0] if self.serving else None

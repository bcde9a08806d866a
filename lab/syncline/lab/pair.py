"""`Pair`: the trainer and one rollout engine of a job in this process, in lock-step at lag 0.

The same classes as the services use, in the same order: export, convert, sign, stage, commit; prompt, sample, fold
to a record, score, decide the batch, step. What the services add (streams, leases, ledger, other processes) is left
out and nothing is put in its place. Deterministic by the job's seeds.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from syncline.contract.events import WorkItem
from syncline.contract.job import JobSpec
from syncline.contract.token_path import Reward, Trajectory, trajectory_id
from syncline.contract.version_path import Minted, VersionId, VersionManifest, VersionRecord
from syncline.environments.environment import load
from syncline.numerics.route_agreement import RouteCounts
from syncline.reference.model import TextCodec, model_folder
from syncline.reference.routes import RecordedRoutes
from syncline.rollout.engine import Chunk, CommitPolicy, RolloutEngine
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.prompts import Prompter, convention_of
from syncline.rollout.spans import fold, trajectory
from syncline.runtime.ledger import Claim, ClaimedGroup
from syncline.runtime.segments import SegmentRow
from syncline.runtime.store import BlobStore
from syncline.sync.publish import Publisher
from syncline.trainer.batch import decide, sample_of, samples_of
from syncline.trainer.engine import Sample, StepResult, TrainerEngine, build_engine

JOB = "j1ab0000000"
KEY = b"the lab signs for itself"
_WORKER = "w0"
DRAIN = CommitPolicy(kind="drain")

MakeRollout = Callable[[JobSpec, Path], RolloutEngine]
"""A rollout engine for a spec on a model root, of job `JOB` and key `KEY`, that holds nothing yet."""


def reference_engine(spec: JobSpec, models: Path) -> ReferenceEngine:
    """The engine that runs in this process."""
    return ReferenceEngine(models, spec.model, JOB, KEY, spec.rollout.max_running, contract=spec.contract())


class Trained(NamedTuple):
    """One update: what was trained on, in batch order, and what the step said of it."""

    rows: tuple[SegmentRow, ...]
    result: StepResult


class Pair:
    """See the module. `folder` takes export, store and the trainer's scratch; `models` is the model root.

    `rollout` makes the engine. A new pair has published nothing: call `publish` before `sample`.
    """

    def __init__(
        self, spec: JobSpec, models: Path, folder: Path, rollout: MakeRollout = reference_engine
    ) -> None:
        # a score is of the whole distribution, whatever the job records: so are the log-probs that it is compared with
        whole = spec.sampling.model_copy(update={"record_mask": False})
        spec = spec.model_copy(update={"sampling": whole})
        self.spec, self.models, self.folder = spec, models, folder
        self.contract = spec.contract()
        self.updates = 0
        self.version: VersionId | None = None
        self.manifest: VersionManifest | None = None
        self.record: VersionRecord | None = None  # of the newest version: what conversion made of it
        self._base: VersionId | None = None  # the version that brought a frozen base, once published
        folder.mkdir(parents=True, exist_ok=True)
        self.trainer: TrainerEngine = build_engine(spec, models, folder / "scratch")
        self.trainer.wake()
        self.rollout = rollout(spec, models)
        self.environment = load(spec.task, spec.seeds.data)
        self.store = BlobStore(folder / "store")
        self._publisher = Publisher(JOB, folder, KEY, self.contract, self.store)
        self._codec = TextCodec(model_folder(models, spec.model.name).path)
        self.prompter = Prompter(
            self.environment, self._codec, spec, self.rollout.describe().experts is not None
        )
        self._convention = convention_of(spec)

    # ---- the path of a version --------------------------------------------------------------------------
    def publish(self, policy: CommitPolicy = DRAIN) -> VersionManifest:
        """Make the trainer's present weights the version that rollout serves; its number is `updates`.

        policy   what happens to requests that run; under `drain` there are none

        Raises what sync and the engine raise for a version that cannot be converted or staged.
        """
        version = VersionId(0, self.updates)
        files = self.trainer.export(self.folder / "export" / str(version), base=self._base is None)
        minted = Minted(
            job=JOB,
            version=version,
            parent=self.version,
            optimizer_step=self.updates,
            contract=self.contract.digest(),
            artefact=f"export/{version}",
            files=files,
            canaries=(),  # the whole batch is scored on both sides
            traceparent="",
            minted_at=time.time(),
            base=self._base,
        )
        record = VersionRecord(
            version=version,
            parent=self.version,
            optimizer_step=self.updates,
            contract=minted.contract,
            state="minted",
        )
        manifest = self._publisher.publish(minted, record)
        self._publisher.drop_export(minted)
        self.rollout.stage(self.store.read_manifest(version), self.store)
        self.rollout.commit(policy)
        if self.contract.adapter is not None:
            self._base = self._base or version
        self.store.collect({version, self._base or version})
        self.version, self.manifest, self.record = version, manifest, record
        return manifest

    # ---- the path of a trajectory -----------------------------------------------------------------------
    def sample(self, prompts: Sequence[int], size: int = 1) -> list[Trajectory]:
        """`size` trajectories for each prompt index, in that order, under the serving version.

        Groups are numbered by prompt index, so what is drawn depends on seeds, prompt and weights alone.
        """
        started = time.time()
        items = [
            WorkItem(
                job=JOB,
                trajectory=trajectory_id(JOB, prompt, index),
                group=prompt,
                index=index,
                prompt=prompt,
                traceparent="",
                submitted_at=started,
            )
            for prompt in prompts
            for index in range(size)
        ]
        chunks: dict[str, list[Chunk]] = {item.trajectory: [] for item in items}
        waiting = iter(items)
        nxt = next(waiting, None)
        while nxt is not None or self.rollout.running:
            # without room and without a request that could make some, the engine itself says why
            while nxt is not None and (self.rollout.room or not self.rollout.running):
                self.rollout.submit(self.prompter.request(nxt, attempt=0))
                nxt = next(waiting, None)
            for chunk in self.rollout.step():
                chunks[chunk.trajectory].append(chunk)
        return [self._record(item, chunks[item.trajectory]) for item in items]

    def _record(self, item: WorkItem, chunks: Sequence[Chunk]) -> Trajectory:
        sampled = fold(chunks, _WORKER)
        return trajectory(
            item,
            0,
            self.prompter.request(item, attempt=0).prompt,
            sampled,
            convention=self._convention,
            contract=self.contract.digest(),
            text=self._codec.decode(sampled.tokens),
            traceparent="",
            queued=0.0,
        )

    def rewards(self, records: Sequence[Trajectory]) -> dict[str, Reward]:
        """The environment's judgement of each record; None and NaN are `unscored`, never 0."""
        out = {}
        for record in records:
            value = self.environment.score(record.prompt, record.text)
            scored = value is not None and math.isfinite(value)
            out[record.trajectory] = Reward(
                trajectory=record.trajectory,
                attempt=record.attempt,
                state="scored" if scored else "unscored",
                value=value if scored else None,
                judge=self.environment.name,
            )
        return out

    def train(self, records: Sequence[Trajectory], rewards: Mapping[str, Reward]) -> Trained:
        """One update on `records`, whole groups in order. The new weights serve after the next `publish`."""
        groups = tuple(
            ClaimedGroup(group, tuple(r.trajectory for r in members), ())
            for group, members in groupby(records, key=lambda r: r.group)
        )
        claim = Claim(update=self.updates + 1, version=self.updates, groups=groups)
        members = decide(
            claim, {r.trajectory: r for r in records}, rewards, self.spec, self.contract.digest()
        )
        rows = tuple(row for row in members if row.use == "train")
        result = self.trainer.step(samples_of(rows), self.updates + 1)
        self.updates += 1
        return Trained(rows, result)

    # ---- scores of the same tokens ----------------------------------------------------------------------
    def score_trainer(self, records: Sequence[Trajectory], as_rollout: bool = False) -> list[array[float]]:
        """Trainer's log-probs [S] of each record's sampled tokens under its present weights."""
        return self.trainer.score(samples(records), as_rollout)

    def score_rollout(self, records: Sequence[Trajectory]) -> list[array[float]]:
        """The serving version's log-probs [S] of the same tokens by prefill, at each record's temperature."""
        return [
            array(
                "f",
                self.rollout.score(
                    record.tokens,
                    record.segments[0].end,
                    buffer="active",
                    temperature=record.convention.temperature,
                ).logprobs,
            )
            for record in records
        ]

    def routes(self, records: Sequence[Trajectory]) -> RouteCounts | None:
        """How the trainer's free choice of experts agrees with the ids that rollout recorded; None: nothing routes.

        Raises `ValueError` naming a record without ids.
        """
        chosen = self.trainer.free_routes(samples(records))
        total: RouteCounts | None = None
        for record, free_TLK in zip(records, chosen or (), strict=chosen is not None):
            if record.expert_ids is None or record.expert_shape is None or record.expert_dtype is None:
                raise ValueError(f"trajectory {record.trajectory}: no expert ids are recorded")
            ids_TLK = RecordedRoutes(record.expert_ids, record.expert_shape, record.expert_dtype).ids()
            counts = RouteCounts.of(free_TLK, ids_TLK)
            total = counts if total is None else total + counts
        return total


def samples(records: Sequence[Trajectory]) -> list[Sample]:
    """Records as the trainer scores them, in order."""
    return [sample_of(record, record.loss_mask, 0.0) for record in records]


def one_thread() -> None:
    """Small models: a second thread costs more than it gives, and one adds in one order."""
    torch.set_num_threads(1)

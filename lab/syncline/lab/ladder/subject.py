"""`Subject`: one recipe on one model, as every level sees it: a settled pair, fixed prefixes, wide weights.

Nothing is built before a level asks for it: the first level must be able to say why nothing can be built.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from syncline.contract.job import JobSpec, LossSpec
from syncline.contract.plan import PrecisionPlan, resolve
from syncline.contract.precision import PrecisionContract
from syncline.contract.schemes import KvFormat
from syncline.contract.token_path import Reward, Trajectory
from syncline.contract.version_path import VersionManifest
from syncline.lab.ladder.rollouts import InProcess, Rollouts
from syncline.lab.pair import Pair, Trained, samples
from syncline.reference.model import LoadedModel, empty_model, load_model, model_folder
from syncline.reference.state import named_windows, state_plan
from syncline.rollout.engine import Score
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.engines.weights import Weights
from syncline.runtime.store import BlobStore
from syncline.trainer.engines.state import WEIGHTS
from syncline.trainer.engines.torch import TorchEngine

PROMPTS, SIZE, TOKENS = 4, 2, 16
ROOM = 5
"""Requests that run together: fewer than there are, so that some join others in mid-flight."""
UNCLIPPED = 1e9
"""A norm that no gradient has, and a ratio that no token has: what reaches the optimizer is the gradient itself. At a
clip's edge a gradient is not continuous: one code that flips would take a token out of the loss, or in."""
LEAST = 1e-3
"""A ratio under which no token falls within the few updates of a climb."""


class Subject:
    """See the module. `folder` takes stores and states; `models` is the model root; `rollouts` makes the engines."""

    def __init__(self, spec: JobSpec, models: Path, folder: Path, rollouts: Rollouts | None = None) -> None:
        self.given, self.spec = spec, small(spec)
        self.rollouts: Rollouts = rollouts or InProcess()
        self.models, self.folder = models, folder
        self._made = 0

    @cached_property
    def contract(self) -> PrecisionContract:
        """Of the job. Raises `ValueError` where the spec names none."""
        return self.spec.contract()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors of the real model: name -> shape."""
        windows = state_plan(empty_model(model_folder(self.models, self.spec.model.name))).windows
        return {name: window.shape for name, window in windows.items()}

    @cached_property
    def plan(self) -> PrecisionPlan:
        """The contract on this model. Raises `BadPlan`."""
        return resolve(self.contract, self.shapes)

    @cached_property
    def pair(self) -> Pair:
        """Both engines, one update old and published: a fresh adapter's B is zero, and zero hides what reads it."""
        pair = Pair(self.spec, self.models, self.new_folder("pair"), self.rollouts.warm)
        pair.publish()
        learn(pair, pair.sample(range(PROMPTS), SIZE))
        pair.publish()
        return pair

    @cached_property
    def records(self) -> list[Trajectory]:
        """The fixed prefixes: sampled once, by the version that serves."""
        return self.pair.sample(range(PROMPTS, 2 * PROMPTS), SIZE)

    @property
    def names(self) -> list[str]:
        """The records' trajectory ids."""
        return [record.trajectory for record in self.records]

    @property
    def manifest(self) -> VersionManifest:
        """Of the version that serves."""
        manifest = self.pair.manifest
        assert manifest is not None, "a settled pair has published"
        return manifest

    @property
    def store(self) -> BlobStore:
        """Where the pair's versions lie."""
        return BlobStore(self.pair.folder / "store")

    # ---- scores of the fixed prefixes -------------------------------------------------------------------------
    def trainer_alone(self, as_rollout: bool) -> list[array[float]]:
        """The trainer's log-probs of each record, one record at a time: nothing is padded, and none has neighbours."""
        return [self.pair.score_trainer([record], as_rollout)[0] for record in self.records]

    def prefill(self, kv: KvFormat) -> list[Score]:
        """Rollout's log-probs of each record at once under a context stored as `kv`, with the experts chosen."""
        rollout = self.pair.rollout
        return [
            rollout.score(
                record.tokens,
                record.segments[0].end,
                buffer="active",
                temperature=self.spec.sampling.temperature,
                experts=rollout.describe().experts is not None,
                kv=kv,
            )
            for record in self.records
        ]

    def matched_routes(self) -> list[Tensor] | None:
        """Experts that the trainer chooses freely as rollout multiplies: int64 [T - 1, L, K] per record."""
        trainer = self.pair.trainer
        assert isinstance(trainer, TorchEngine), "a small spec names it"
        with trainer.as_rollout():
            parts = [trainer.free_routes(samples([record])) for record in self.records]
        return None if parts[0] is None else [part[0] for part in parts if part is not None]

    def serving(self) -> Weights:
        """The buffer that rollout reads. For levels that look into it: a server's cannot be."""
        assert isinstance(self.pair.rollout, ReferenceEngine), f"{self.rollouts.name} shows no buffer"
        active = self.pair.rollout._active()
        assert active is not None, "a settled pair serves"
        return active

    # ---- bytes ------------------------------------------------------------------------------------------------
    def blob(self, digest: str) -> bytes:
        """A tensor's bytes, as they lie in the store."""
        return bytes(self.store.read(digest))

    def new_folder(self, what: str) -> Path:
        """A folder that nothing has used."""
        self._made += 1
        made = self.folder / f"{self._made}-{what}"
        made.mkdir(parents=True)
        return made

    # ---- the trainer's weights, by a way of their own ---------------------------------------------------------
    def masters(self) -> dict[str, Tensor]:
        """What the trainer would put into a checkpoint now: parameter name -> FP32 master."""
        folder = self.new_folder("state")
        self.pair.trainer.save(folder)
        found = load_file(folder / WEIGHTS)
        return {n.removeprefix("parameter."): t for n, t in found.items() if n.startswith("parameter.")}

    def wide_model(self, masters: Mapping[str, Tensor]) -> LoadedModel:
        """A plain `transformers` model with `masters` in FP32; of an adapter job the base alone."""
        loaded = load_model(self.models, self.spec.model, self.spec.seeds.model)
        own = dict(loaded.model.named_parameters())
        with torch.no_grad():
            for name, master in masters.items():
                if name in own:
                    own[name].copy_(master)
        return loaded

    def wide(self, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same by checkpoint name."""
        loaded = self.wide_model(masters)
        return {name: view.clone() for name, view in named_windows(loaded.model, loaded.plan).items()}


def small(spec: JobSpec) -> JobSpec:
    """The job with few prompts, responses of several lengths, and the plainest loss: levels vary one thing each."""
    sampling = spec.sampling.model_copy(
        update={"max_tokens": TOKENS, "min_tokens": 0, "length": "lognormal", "length_median": TOKENS // 2}
    )
    return spec.model_copy(
        update={
            "sampling": sampling,
            "batch": spec.batch.model_copy(update={"groups": PROMPTS, "group_size": SIZE}),
            "loss": LossSpec(
                advantage="group_mean", normaliser="token_mean", clip_low=1 - LEAST, clip_high=UNCLIPPED
            ),
            "optimizer": spec.optimizer.model_copy(update={"name": "adamw", "clip_norm": UNCLIPPED}),
            "rollout": spec.rollout.model_copy(update={"engine": "reference", "max_running": ROOM}),
            "trainer": spec.trainer.model_copy(update={"engine": "torch"}),
        }
    )


def bounded(spec: JobSpec) -> JobSpec:
    """The job with its own loss and optimizer, and batches that a short run can afford."""
    batch = {"groups": min(spec.batch.groups, 8), "group_size": min(spec.batch.group_size, 8)}
    return spec.model_copy(
        update={
            "batch": spec.batch.model_copy(update=batch),
            "rollout": spec.rollout.model_copy(update={"engine": "reference"}),
            "trainer": spec.trainer.model_copy(update={"engine": "torch"}),
        }
    )


def narrow(spec: JobSpec) -> JobSpec:
    """The job with micro-batches of about one trajectory: a step has several, as real ones have."""
    return spec.model_copy(update={"batch": spec.batch.model_copy(update={"micro_tokens": 2 * TOKENS})})


def learn(pair: Pair, records: Sequence[Trajectory]) -> Trained:
    """One update on `records` whose rewards alternate, so that every group has a gradient whatever was sampled."""
    rewards = {
        record.trajectory: Reward(
            trajectory=record.trajectory,
            attempt=record.attempt,
            state="scored",
            value=float(record.index % 2),
            judge="the ladder",
        )
        for record in records
    }
    return pair.train(records, rewards)

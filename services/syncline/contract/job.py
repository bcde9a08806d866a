"""The job spec: what a user submits, as TOML or as the same JSON. Unknown key = error with the nearest right key.

`JobSpec.model_validate` does the structure; `problems()` finds combinations that cannot work. Both run at the
gateway in milliseconds, without torch and without the model.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, JsonValue, model_validator

from syncline.contract.evaluation_spec import EvaluationSpec
from syncline.contract.pool_spec import PoolSpec
from syncline.contract.precision import Hardware, PrecisionContract, Variant, with_variant
from syncline.contract.prompts_spec import PromptsSpec
from syncline.contract.recipes import RECIPES, read
from syncline.contract.sglang_spec import SGLangSpec
from syncline.contract.spec_part import Part as _Part
from syncline.contract.task_spec import RewardSpec as RewardSpec
from syncline.contract.task_spec import TaskSpec as TaskSpec
from syncline.contract.tracking_spec import TrackingSpec as TrackingSpec
from syncline.contract.trainer_spec import ParallelSpec as ParallelSpec
from syncline.contract.trainer_spec import TrainerSpec as TrainerSpec
from syncline.contract.transfer_spec import DiagnosticsSpec as DiagnosticsSpec
from syncline.contract.transfer_spec import TransferSpec as TransferSpec
from syncline.contract.turns import TurnsSpec
from syncline.contract.validation_spec import ValidationSpec as ValidationSpec

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class ModelSpec(_Part):
    """`name` is a folder under the installation's model root (config.json, tokenizer.json, weights optional)."""

    name: Name = Field(description="folder under the model root")
    weights: Literal["random", "pretrained"] = Field(
        "random", description="random: initialised from seeds.model; pretrained: the folder's safetensors"
    )


class SamplingSpec(_Part):
    temperature: float = Field(1.0, gt=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(16, ge=1, le=1_000_000)
    min_tokens: int = Field(0, ge=0)
    length: Literal["stop", "lognormal"] = Field(
        "stop",
        description="stop: until a stop token or max_tokens; lognormal: each trajectory is sampled to a length drawn "
        "from its seed, with stop tokens suppressed (reproduces heavy-tailed loads)",
    )
    length_sigma: float = Field(1.0, gt=0, le=3)
    length_median: int = Field(8, ge=1)
    record_mask: bool = Field(
        False,
        description="record the ids that top-p and top-k leave at each token: log-probs of rollout and trainer are "
        "then those of the cut distribution, which importance corrections need",
    )


class BatchSpec(_Part):
    groups: int = Field(8, ge=1, le=65536, description="groups per update")
    group_size: int = Field(8, ge=1, le=4096)
    micro_tokens: int = Field(16384, ge=1, description="tokens per forward pass of the trainer")
    incomplete: Literal["train_if_two", "drop"] = Field(
        "train_if_two",
        description="a group with lost or unscored members: train with at least two, or drop it",
    )


class OptimizerSpec(_Part):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    warmup: int = Field(0, ge=0, description="updates of linear warm-up")
    clip_norm: float = Field(1.0, gt=0)


class CorrectionSpec(_Part):
    kind: Literal["none", "truncate", "mask"] = "none"
    level: Literal["token", "sequence"] = "token"
    low: float = Field(0.0, ge=0)
    high: float = Field(2.0, gt=0)


class KLSpec(_Part):
    coefficient: float = Field(0.0, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"


class LossSpec(_Part):
    kind: Literal["ppo", "gspo", "cispo", "decoupled_ppo"] = "ppo"
    advantage: Literal["group_std", "group_mean"] = Field(
        "group_std", description="group_std: (r - mean) / std; group_mean: r - mean"
    )
    normaliser: Literal["token_mean", "sequence_mean"] = Field(
        "token_mean",
        description="over all loss tokens of the update, or over sequences of each one's token mean",
    )
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    entropy: float = Field(0.0, ge=0, description="entropy bonus coefficient")
    correction: CorrectionSpec = CorrectionSpec()
    kl: KLSpec = KLSpec()


class SwitchPlan(_Part):
    at_update: int = Field(ge=1)
    mode: Literal["colocated", "disjoint"]


class ScheduleSpec(_Part):
    mode: Literal["colocated", "disjoint"] = "colocated"
    updates: int = Field(50, ge=1, le=10_000_000)
    max_lag: int = Field(1, ge=0, le=1000)
    lag_policy: Literal["wait", "expire", "mask_old_tokens"] = "wait"
    in_flight: Literal["drain", "continue_old", "in_place"] = "continue_old"
    kv: Literal["recomputed", "carried"] = Field(
        "recomputed", description="with in_place: what happens to the KV"
    )
    carried_age: int = Field(1, ge=1, description="with kv carried: versions a KV entry may be behind")
    switches: tuple[SwitchPlan, ...] = ()
    policy: Literal["fixed", "measured"] = Field(
        "fixed",
        description="fixed: the mode changes by `switches` and by request; measured: also by phase times",
    )


class RolloutSpec(PoolSpec):
    engine: Literal["reference", "sglang"] = "reference"
    sglang: SGLangSpec = Field(default_factory=SGLangSpec, description="the server of engine sglang")
    max_running: int = Field(64, ge=1, le=4096, description="requests decoded together on one worker")
    record_experts: bool = Field(True, description="record expert ids of MoE models")
    pace: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (), description="share of full speed per worker, in order; reproduces uneven fleets; empty: all 1"
    )


class PrecisionSpec(_Part):
    recipe: str | None = Field(
        "bf16",
        description="a shipped precision contract; `GET /v1/recipes` lists them. None: `custom` is the contract",
    )
    custom: dict[str, JsonValue] | None = Field(
        None, description="a contract of one's own, in the form of a recipe file; instead of `recipe`"
    )
    variant: Variant = Field(
        "contract", description="trainer GEMMs: as the contract says, or one of the study's four variants"
    )
    emulation: bool = Field(
        True,
        description="false: refuse what `device.hardware` has no native kernels for, where it could be emulated",
    )

    @model_validator(mode="before")
    @classmethod
    def _custom_replaces_the_default(cls, given: Any) -> Any:
        """Who gives `custom` and no `recipe` means no recipe; who gives both is told so by the job rules."""
        if isinstance(given, dict) and given.get("custom") is not None:
            return {"recipe": None, **given}
        return given


class CheckpointSpec(_Part):
    every: int = Field(10, ge=1, description="updates between checkpoints; the last update always makes one")
    keep: int = Field(2, ge=1)


class SeedSpec(_Part):
    model: int = Field(0, ge=0, lt=2**31)
    data: int = Field(0, ge=0, lt=2**31)
    sampling: int = Field(0, ge=0, lt=2**31)


class RetentionSpec(_Part):
    versions: int = Field(
        4, ge=2, description="newest versions whose blobs are kept; named ones are kept anyway"
    )
    hours: float = Field(168.0, gt=0, description="how long the ledger of an ended job stays in Redis")


class LimitSpec(_Part):
    attempts: int = Field(5, ge=1, le=100, description="tries at one trajectory before it ends as failed")
    batch_wait: float = Field(
        600.0, gt=0, description="seconds the trainer may wait for a batch before the job fails"
    )
    activation_wait: float = Field(
        120.0, gt=0, description="seconds one version may take from minted to active"
    )
    worker_start: float = Field(180.0, gt=0, description="seconds a process may take to report for duty")
    worker_idle: float = Field(
        30.0, gt=0, description="seconds after which a silent worker's requests are taken over"
    )


class DeviceSpec(_Part):
    hardware: Hardware = Field("cpu", description="what the engines run on; decides which kernels are native")
    memory_mb: int = Field(8192, ge=256, description="budget of the shared device (on CPU: resident memory)")


class JobSpec(_Part):
    """One RL job. Everything that has a default may be left out; the resolved form is stored and hashed."""

    name: Name
    kind: Literal["train", "evaluate"] = Field(
        "train",
        description="evaluate: sample held-out prompts with a version of another job; nothing is trained",
    )
    model: ModelSpec
    task: TaskSpec = TaskSpec()
    prompts: PromptsSpec = PromptsSpec()
    turns: TurnsSpec = TurnsSpec()
    reward: RewardSpec = RewardSpec()
    sampling: SamplingSpec = SamplingSpec()
    batch: BatchSpec = BatchSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    loss: LossSpec = LossSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    rollout: RolloutSpec = RolloutSpec()
    trainer: TrainerSpec = TrainerSpec()
    precision: PrecisionSpec = PrecisionSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    seeds: SeedSpec = SeedSpec()
    retention: RetentionSpec = RetentionSpec()
    limits: LimitSpec = LimitSpec()
    transfer: TransferSpec = TransferSpec()
    diagnostics: DiagnosticsSpec = DiagnosticsSpec()
    tracking: TrackingSpec = TrackingSpec()
    validation: ValidationSpec = ValidationSpec()
    device: DeviceSpec = DeviceSpec()
    evaluation: EvaluationSpec | None = None

    def versions_of(self, job: str) -> str:
        """The job whose store, key and versions the processes of `job` use: an evaluation has none of its own."""
        if self.kind == "evaluate" and self.evaluation is not None and self.evaluation.job is not None:
            return self.evaluation.job
        return job

    def canonical(self) -> str:
        """The resolved spec as canonical JSON (sorted keys, no spaces)."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def hash(self) -> str:
        """sha256 hex of `canonical()`."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def contract(self) -> PrecisionContract:
        """The precision contract of recipe (or `custom`) and variant. Raises `ValueError` where neither makes one."""
        precision = self.precision
        if precision.custom is not None:
            return with_variant(read(precision.custom, "precision.custom"), precision.variant)
        if precision.recipe not in RECIPES:
            raise ValueError(f"precision.recipe: there is no recipe {precision.recipe!r}")
        return with_variant(RECIPES[precision.recipe], precision.variant)

    def contract_digest(self) -> str:
        """Digest of `contract()`."""
        return self.contract().digest()


class Problem(BaseModel):
    """One thing wrong with a spec: where, what, and what would be right."""

    path: str
    message: str
    hint: str = ""


def schema() -> dict[str, Any]:
    """JSON schema of a job spec."""
    return JobSpec.model_json_schema()

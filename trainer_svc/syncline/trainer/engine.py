"""The trainer engine protocol, and the `match` that chooses one.

An engine holds one policy: master weights, optimizer state, and a reference policy where the loss asks
for one. It knows nothing of Redis, the ledger or phases. Every method but `describe`, `wake` and `sleep`
needs it awake.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from syncline.contract.job import JobSpec
from syncline.contract.precision_trace import ComponentTrace
from syncline.contract.recorded import SamplingMask
from syncline.numerics.route_agreement import RouteCounts
from syncline.reference.routes import RecordedRoutes
from syncline.trainer.loss import Tally


class EngineAsleep(RuntimeError):
    """Something was asked of an engine that has given its memory back."""


class NonFiniteWeights(RuntimeError):
    """An optimizer step left weights that are not finite. They are never exported; the message names them."""


class MisalignedRoutes(RuntimeError):
    """Recorded expert ids that belong to the neighbouring tokens were replayed. No step was made with them."""


@dataclass(frozen=True)
class Sample:
    """One trajectory as the engine sees it.

    tokens      array('i') [T]  prompt, sampled and observed ids in order
    positions   array('i') [S]  where in `tokens` the sampled ids lie, rising, none of them 0
    behaviour   array('f') [S]  log-probs recorded at sampling
    loss_mask   bytes      [S]  1: the token takes part in the loss
    routes      expert ids of the first T - 1 tokens; None: not recorded
    mask        what top-k and top-p left at each sampled token: `behaviour` and the trainer's log-probs are over those
                ids alone; None: over the whole vocabulary
    """

    trajectory: str
    tokens: array[int]
    positions: array[int]
    behaviour: array[float]
    loss_mask: bytes
    advantage: float
    temperature: float
    routes: RecordedRoutes | None = None
    mask: SamplingMask | None = None


@dataclass(frozen=True)
class StepResult:
    """What one update did.

    logprobs    [S] per sample, in order: the trainer's log-probs *before* the step, under each sample's
                temperature; also those of tokens outside the loss
    weights     [S] per sample: the weight that the correction gave each token, 1 without one, 0 outside
                the loss
    loss, grad_norm   None when nothing was in the loss
    non_finite  names of what was not finite: "logprobs of TRAJECTORY", "loss", "gradient of PARAMETER"
    skipped     the weights and the optimizer are as they were
    routes      how the routes that the router would choose freely agree with the recorded ones, over all tokens
                that were fed; None: no sample has a record
    trace       fprop, dgrad, wgrad and optimizer as this very step carried them out; empty: nothing was in the loss
    """

    logprobs: tuple[array[float], ...]
    weights: tuple[array[float], ...]
    loss: float | None
    grad_norm: float | None
    tally: Tally
    non_finite: tuple[str, ...]
    skipped: bool
    routes: RouteCounts | None = None
    trace: tuple[ComponentTrace, ...] = ()


@dataclass(frozen=True)
class Description:
    """What an engine is. `parameters` counts trained elements."""

    name: str
    device: str
    parameters: int
    tensors: tuple[str, ...]  # checkpoint names that `export` writes
    trainer_dtype: str
    vocab: int


class TrainerEngine(Protocol):
    """One policy under training. Calls come from one thread."""

    @property
    def memory(self) -> int:
        """Bytes that it will take when awake, as far as can be told beforehand."""
        ...

    @property
    def awake(self) -> bool:
        """Whether it holds its memory."""
        ...

    def describe(self) -> Description:
        """Raises `EngineAsleep` before the first wake."""
        ...

    def wake(self) -> None:
        """Take memory: the model at first, afterwards the state that `sleep` put away, bit by bit the same.

        A second call does nothing.
        """
        ...

    def sleep(self) -> None:
        """Put the state on disk and give memory back. A second call does nothing."""
        ...

    def score(self, samples: Sequence[Sample], as_rollout: bool = False) -> list[array[float]]:
        """Log-probs [S] of each sample's sampled tokens under the present weights, at its temperature.

        as_rollout   under the weights as rollout will hold them, low-bit ones as codes, and with rollout's GEMMs

        A job with `trainer.router_replay` replays the samples' routes, unless `as_rollout`: those scores prove
        weights, so the router chooses freely. Raises `CannotReplay` naming a sample whose record is missing or wrong.
        """
        ...

    def free_routes(self, samples: Sequence[Sample]) -> list[Tensor] | None:
        """Expert ids, int64 [tokens fed, L, K] per sample, that the routers choose freely under the present weights.

        None: the model does not route, or there is no sample. Also in a job that replays routes.
        """
        ...

    def step(self, samples: Sequence[Sample], update: int) -> StepResult:
        """One optimizer step over all `samples`, numbered `update` (1 is the first; it sets the warm-up).

        No samples, no loss token, or anything non-finite: the step is skipped and the result says so.
        Raises `NonFiniteWeights` if the step itself broke the weights, and, in a job with `trainer.router_replay`,
        `CannotReplay` or `MisalignedRoutes` before it changes any.
        """
        ...

    def export(self, folder: Path, base: bool = True) -> dict[str, str]:
        """Write the present weights into the new `folder`, fsynced (`contract/exports.py`). Returns file -> sha256 hex.

        Hugging Face checkpoint names, in the contract's trainer dtype, or, where `convert.place` is `trainer_rank`, as
        rollout will hold them. Raises `NonFiniteWeights`, also for a weight that cannot be quantised.

        base   False, for a job with an adapter: the adapter alone, as `adapter.safetensors`
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random state into the existing `folder` (safetensors, fsynced)."""
        ...

    def load(self, folder: Path) -> None:
        """Inverse of `save`. Raises `ValueError` naming the tensor that does not fit, and changes
        nothing then.
        """
        ...


def build_engine(spec: JobSpec, models: Path, scratch: Path) -> TrainerEngine:
    """The engine that `spec.trainer.engine` names, asleep.

    models    model root
    scratch   folder of the engine's own, for the state of a sleeping engine
    """
    match spec.trainer.engine:
        case "torch":
            from syncline.trainer.engines.torch import TorchEngine

            return TorchEngine(spec, models, scratch)
        case "megatron":
            from syncline.trainer.engines.megatron.engine import MegatronEngine

            return MegatronEngine(spec, models, scratch)

"""Rank 0's `TrainerEngine`: commands to the ranks, and what they answer put together."""

from __future__ import annotations

import math
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from syncline.contract.adapters import is_adapter
from syncline.contract.exports import ShardedExport
from syncline.contract.job import JobSpec
from syncline.contract.sharding.layout import dimensions
from syncline.numerics.route_agreement import RouteCounts
from syncline.reference.model import model_folder
from syncline.runtime.export_files import finish, stamp_of
from syncline.trainer.engine import Description, EngineAsleep, NonFiniteWeights, Sample, StepResult
from syncline.trainer.engines import state
from syncline.trainer.engines.forward import fed
from syncline.trainer.engines.megatron import families, topology
from syncline.trainer.engines.megatron.precision import check_contract
from syncline.trainer.engines.megatron.ranks import group_of
from syncline.trainer.engines.megatron.recorded import check_recorded, counted
from syncline.trainer.engines.megatron.routes import joined
from syncline.trainer.engines.megatron.traced import gemms, optimizer
from syncline.trainer.engines.megatron.wire import Act, Answer, Micro, packed
from syncline.trainer.engines.precision import elements
from syncline.trainer.loss import Tally


class MegatronEngine:
    """`engine.TrainerEngine` over megatron-core. `scratch` takes the state while it sleeps."""

    def __init__(self, spec: JobSpec, models: Path, scratch: Path) -> None:
        self._spec, self._models, self._scratch = spec, models, scratch
        self._contract = spec.contract()
        check_contract(self._contract)
        self._folder = model_folder(models, spec.model.name)
        families.settings_of(self._folder.config)
        self._grid = topology.grid_of(spec)
        topology.check(self._grid, dimensions(self._folder.config.to_dict()))
        self._sizes = state.import_code(self._folder)
        self._group = group_of(self._grid, spec.trainer.parallel.deadline)
        self._number = self._group.build(spec, models, scratch)
        weakref.finalize(self, self._group.drop, self._number)
        self._woken = False
        self._description: Description | None = None

    # ---- memory -----------------------------------------------------------------------------------------
    @property
    def memory(self) -> int:
        whole = elements(self._contract, self._sizes, self._spec.loss.kl.coefficient > 0)
        return 4 * whole // (self._grid.tp * self._grid.pp)

    @property
    def awake(self) -> bool:
        return self._woken

    def describe(self) -> Description:
        if self._description is None:
            raise EngineAsleep("the engine has not been loaded yet: wake it first")
        return self._description

    def wake(self) -> None:
        if self._woken:
            return
        told = self._all("wake")[0].model
        assert told is not None
        self._model = told
        self._woken = True
        self._description = Description(
            name="megatron",
            device=told.device,
            parameters=sum(math.prod(told.shapes[name]) for name in told.trained),
            tensors=tuple(sorted(told.shapes)),
            trainer_dtype=self._contract.trainer.parameters,
            vocab=told.vocab,
        )

    def sleep(self) -> None:
        if self._woken:
            self._all("sleep")
            self._woken = False

    def _all(self, what: str, samples: Sequence[Sample] = (), **more: object) -> list[Answer]:
        act = Act(engine=self._number, what=what, samples=packed(samples), **more)  # type: ignore[arg-type]
        return self._group.run(act)

    def _need(self) -> None:
        if not self._woken:
            raise EngineAsleep("the engine is asleep: wake it first")

    # ---- scores -----------------------------------------------------------------------------------------
    def score(self, samples: Sequence[Sample], as_rollout: bool = False) -> list[array[float]]:
        self._need()
        if self._spec.trainer.router_replay and not as_rollout:
            check_recorded(samples, self._model.routing, True)
        out: list[array[float]] = [array("f")] * len(samples)
        for micro in _micros(self._all("score", samples, flag=as_rollout)):
            for i, raw in zip(micro.indices, micro.logprobs, strict=True):
                out[i] = array("f", raw)
        return out

    def free_routes(self, samples: Sequence[Sample]) -> list[Tensor] | None:
        self._need()
        routing = self._model.routing
        if not routing.layers or not samples:
            return None
        caught = [part for answer in self._all("routes", samples) for part in answer.caught]
        return joined(samples, caught, routing.layers, routing.topk)

    # ---- steps ------------------------------------------------------------------------------------------
    def step(self, samples: Sequence[Sample], update: int) -> StepResult:
        self._need()
        replay = self._spec.trainer.router_replay
        check_recorded(samples, self._model.routing, replay)
        answers = self._all("gradients", samples)
        logprobs: list[array[float]] = [array("f")] * len(samples)
        weights: list[array[float]] = [array("f")] * len(samples)
        bad = [f"gradient of {name}" for answer in answers for name in answer.bad]
        bad += [f"operand: {why}" for answer in answers for why in answer.unreadable]
        loss, tally = 0.0, Tally()
        for micro in _micros(answers):
            loss += array("d", micro.loss)[0]
            tally += Tally(**micro.tally)
            bad += micro.non_finite
            for i, scores, of in zip(micro.indices, micro.logprobs, micro.weights, strict=True):
                logprobs[i], weights[i] = array("f", scores), array("f", of)
        counts = self._counts(samples, answers, replay)
        if not any(any(s.loss_mask) for s in samples):
            return StepResult(tuple(logprobs), tuple(weights), None, None, tally, tuple(bad), True, counts)
        norm: float | None = None
        stepped = answers
        if bad:
            self._all("drop")
        else:
            stepped = self._all("apply", update=update)
            norm = stepped[0].norm
            if broken := [f"weight {name}" for answer in stepped for name in answer.bad]:
                raise NonFiniteWeights(f"update {update} left {', '.join(broken)} non-finite")
        return StepResult(
            logprobs=tuple(logprobs),
            weights=tuple(weights),
            loss=loss,
            grad_norm=norm,
            tally=tally,
            non_finite=tuple(sorted(set(bad))),
            skipped=bool(bad),
            routes=counts,
            trace=(*gemms(self._model, answers), optimizer(self._model, stepped, not bad, self._spec)),
        )

    def _counts(
        self, samples: Sequence[Sample], answers: Sequence[Answer], replay: bool
    ) -> RouteCounts | None:
        caught = [part for answer in answers for part in answer.caught]
        if not caught or not any(s.routes is not None for s in samples):
            return None
        routing = self._model.routing
        free = joined(samples, caught, routing.layers, routing.topk)
        try:
            return counted(samples, free, [fed(s) for s in samples], replay)
        except RuntimeError:
            self._all("drop")
            raise

    # ---- files ------------------------------------------------------------------------------------------
    def export(self, folder: Path, base: bool = True) -> dict[str, str]:
        self._need()
        answers = self._all("export", folder=str(folder), flag=base)
        if broken := [f"weight {name}" for answer in answers for name in answer.bad]:
            raise NonFiniteWeights(f"not exported: {', '.join(broken)} non-finite")
        if answers[0].files:
            return answers[0].files
        ranks = [answer.export for answer in answers if answer.export is not None]
        layout = self._model.layout
        shapes = {name: shape for name, shape in self._model.shapes.items() if base or is_adapter(name)}
        shards = ShardedExport(layout=layout, shapes=shapes, stamp=stamp_of(layout, ranks))
        config = (self._folder.path / "config.json").read_bytes()
        return finish(folder, shards, ranks, config)

    def save(self, folder: Path) -> None:
        self._need()
        self._all("save", folder=str(folder))

    def load(self, folder: Path) -> None:
        self._need()
        self._all("load", folder=str(folder))


def _micros(answers: Sequence[Answer]) -> Iterator[Micro]:
    """In an order that no number of ranks changes."""
    yield from sorted((m for answer in answers for m in answer.micros), key=lambda m: m.indices)

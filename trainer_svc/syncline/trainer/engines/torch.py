"""The plain torch engine: any causal LM of `transformers`, on CPU or one GPU.

Numbers: master weights and optimizer state are FP32. Under the contract's trainer dtype bf16 the model
that runs holds the masters rounded to BF16 values and multiplies them in FP32 (in BF16 if the contract's `compute`
says so), so the trainer scores the very values that it exports. Under fp32 the model holds the masters themselves.

Dropout is off while training: the log-probs of a step are those that any scorer of the version gets.
Nothing here draws random numbers, and one thread adds in one order, so on CPU a step is repeatable to
the bit.
"""

from __future__ import annotations

import math
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from syncline.contract.job import JobSpec
from syncline.numerics.quantized import NotQuantizable
from syncline.numerics.route_agreement import RouteCounts
from syncline.reference.adapter import attach
from syncline.reference.model import LoadedModel, load_model, model_folder, round_to_bf16
from syncline.reference.state import compute_in_bf16
from syncline.trainer.engine import Description, EngineAsleep, NonFiniteWeights, Sample, StepResult
from syncline.trainer.engines import state
from syncline.trainer.engines.forward import fed, rows_of, sampled_logprobs
from syncline.trainer.engines.free_routes import free_routes
from syncline.trainer.engines.loss_inputs import loss_inputs, loss_settings
from syncline.trainer.engines.parts import Part, split, unreadable
from syncline.trainer.engines.precision import Numerics, check_contract, elements
from syncline.trainer.engines.replay import Routes, total
from syncline.trainer.loss import Normaliser, Tally, policy_loss
from syncline.trainer.pack import PASS_CELLS, micro_batches

_LOGITS_BYTES = 256 << 20
"""Bound on the FP32 logits of one forward pass, so that a large vocabulary shrinks the micro-batch."""


class TorchEngine:
    """`engine.TrainerEngine` over one `transformers` model. `scratch` takes the state while it sleeps."""

    def __init__(self, spec: JobSpec, models: Path, scratch: Path, device: str = "cpu") -> None:
        self._spec = spec
        self._contract = spec.contract()
        check_contract(self._contract)
        self._models = models
        self._scratch = scratch
        self._device = torch.device(device)
        self._loss = loss_settings(spec)
        self._live: state.Live | None = None
        self._routes: Routes | None = None
        self._numerics: Numerics | None = None
        self._slept = False
        self._reference: LoadedModel | None = None
        self._description: Description | None = None
        self._sizes = state.import_code(model_folder(models, spec.model.name))

    # ---- memory -----------------------------------------------------------------------------------------
    @property
    def memory(self) -> int:
        return 4 * elements(self._contract, self._sizes, self._loss.kl > 0) + 3 * _LOGITS_BYTES // 4

    @property
    def awake(self) -> bool:
        return self._live is not None

    def describe(self) -> Description:
        if self._description is None:
            raise EngineAsleep("the engine has not been loaded yet: wake it first")
        return self._description

    def wake(self) -> None:
        if self._live is not None:
            return
        loaded, rounded = self._load(), self._contract.trainer.parameters == "bf16"
        numerics = Numerics(loaded, self._contract)
        adapters, adapter = None, self._contract.adapter
        if adapter is not None:
            adapters = attach(loaded.model, loaded.plan, adapter, self._spec.seeds.model)
        live = state.Live(loaded, self._spec.optimizer, rounded, numerics.gathers, adapters)
        if self._contract.compute == "bf16":
            compute_in_bf16(loaded.model)
        if self._slept:
            live.read(self._scratch)
        else:
            shutil.rmtree(self._scratch, ignore_errors=True)  # a dead process's sleep is no checkpoint
        if self._loss.kl > 0 and adapters is None:
            self._reference = self._load()
            if rounded:
                round_to_bf16(self._reference.model)
            if self._contract.compute == "bf16":
                compute_in_bf16(self._reference.model)
        self._numerics = numerics
        self._routes = Routes(live.loaded.model, self._spec.trainer.router_replay)
        self._live = live
        self._description = Description(
            name="torch",
            device=str(self._device),
            parameters=sum(p.numel() for p in live.masters.values()),
            tensors=tuple((loaded.plan if adapters is None else adapters.whole(loaded.plan)).windows),
            trainer_dtype=self._contract.trainer.parameters,
            vocab=live.loaded.vocab,
        )

    def sleep(self) -> None:
        if self._live is None:
            return
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._live.write(self._scratch, durable=False)
        self._slept = True
        self._live = self._reference = self._routes = self._numerics = None
        state.return_memory()

    def _load(self) -> LoadedModel:
        loaded = load_model(self._models, self._spec.model, self._spec.seeds.model)
        loaded.model.to(self._device)  # type: ignore[arg-type]  # transformers' stub wants a string
        return loaded

    @contextmanager
    def _as_reference(self) -> Iterator[PreTrainedModel]:
        """The reference policy: a model of its own, or, of a job with an adapter, the base without it."""
        if self._reference is not None:
            yield self._reference.model
            return
        live = self._need()
        assert live.base is not None
        with live.base.adapters.disabled():
            yield live.loaded.model

    def _need(self) -> state.Live:
        if self._live is None:
            raise EngineAsleep("the engine is asleep: wake it first")
        return self._live

    def _need_numerics(self) -> Numerics:
        if self._numerics is None:
            raise EngineAsleep("the engine is asleep: wake it first")
        return self._numerics

    def _need_routes(self) -> Routes:
        if self._routes is None:
            raise EngineAsleep("the engine is asleep: wake it first")
        return self._routes

    # ---- scores -----------------------------------------------------------------------------------------
    @contextmanager
    def as_rollout(self) -> Iterator[None]:
        """Inside, the model is what rollout will hold of the present weights and multiplies as rollout does: scores and
        free routes, without gradients.
        """
        with torch.no_grad(), self._need_numerics().as_rollout(self._need()):
            yield

    def score(self, samples: Sequence[Sample], as_rollout: bool = False) -> list[array[float]]:
        live = self._need()
        out: list[array[float]] = [array("f")] * len(samples)
        with self.as_rollout() if as_rollout else torch.no_grad():
            for indices in self._plan(samples):
                part_samples = [samples[i] for i in indices]
                rows = rows_of(part_samples, self._device)
                routed = self._need_routes().around(part_samples, rows.ids_BT.shape[1])
                with nullcontext() if as_rollout else routed:
                    logprobs_N, _ = sampled_logprobs(live.loaded.model, rows, False)
                for i, part in zip(indices, split(logprobs_N, rows.lengths_B), strict=True):
                    out[i] = part
        return out

    def _plan(self, samples: Sequence[Sample]) -> list[list[int]]:
        vocab = self._need().loaded.vocab
        cells = min(self._spec.batch.micro_tokens, max(1, _LOGITS_BYTES // (4 * vocab)))
        return micro_batches([fed(s) for s in samples], cells, PASS_CELLS)

    def free_routes(self, samples: Sequence[Sample]) -> list[Tensor] | None:
        tap = self._need_routes().tap
        return free_routes(self._need().loaded.model, tap, samples) if tap.layers and samples else None

    # ---- the update -------------------------------------------------------------------------------------
    def step(self, samples: Sequence[Sample], update: int) -> StepResult:
        live, numerics = self._need(), self._need_numerics()
        live.loaded.model.zero_grad(set_to_none=True)
        numerics.begin()
        logprobs: list[array[float]] = [array("f")] * len(samples)
        weights: list[array[float]] = [array("f")] * len(samples)
        normaliser = Normaliser.over(self._spec.loss.normaliser, [sum(s.loss_mask) for s in samples])
        bad: list[str] = []
        routes: list[RouteCounts | None] = [None] * len(samples)
        loss = 0.0
        tally = Tally()
        for indices in self._plan(samples):
            part = self._micro(live, [samples[i] for i in indices], normaliser)
            loss += part.loss
            tally += part.tally
            bad += part.non_finite
            for n, i in enumerate(indices):
                logprobs[i], weights[i], routes[i] = part.logprobs[n], part.weights[n], part.routes[n]
        counts = total(samples, routes, self._spec.trainer.router_replay)
        if normaliser.tokens == 0:
            return StepResult(tuple(logprobs), tuple(weights), None, None, tally, tuple(bad), True, counts)
        bad += live.non_finite_gradients()
        trace = numerics.gemms(live, whole=not bad)
        norm: float | None = None
        if not bad:
            norm = live.apply(update)
            broken = live.non_finite_weights()
            if broken:
                raise NonFiniteWeights(f"update {update} left {', '.join(broken)} non-finite")
        live.loaded.model.zero_grad(set_to_none=True)
        return StepResult(
            logprobs=tuple(logprobs),
            weights=tuple(weights),
            loss=loss,
            grad_norm=norm,
            tally=tally,
            non_finite=tuple(sorted(set(bad))),
            skipped=bool(bad),
            routes=counts,
            trace=(*trace, numerics.optimizer(live, stepped=not bad)),
        )

    def _micro(self, live: state.Live, samples: Sequence[Sample], normaliser: Normaliser) -> Part:
        """Forward, loss and backward of one micro-batch; gradients add up in the model."""
        rows = rows_of(samples, self._device)
        try:
            with self._need_routes().around(samples, rows.ids_BT.shape[1]) as routes:
                logprobs_N, entropy_N = sampled_logprobs(live.loaded.model, rows, self._loss.entropy > 0)
        except NotQuantizable as error:
            return unreadable(samples, str(error))
        reference_N: Tensor | None = None
        if self._loss.kl > 0:
            with torch.no_grad(), self._as_reference() as model:
                reference_N = sampled_logprobs(model, rows, False)[0]
        in_loss_N, inputs = loss_inputs(rows.lengths_B, samples, logprobs_N, entropy_N, reference_N)
        parts = split(logprobs_N.detach(), rows.lengths_B)
        bad: list[str] = []
        if not bool(logprobs_N.detach().isfinite().all()):
            bad = [
                f"logprobs of {sample.trajectory}"
                for sample, part in zip(samples, parts, strict=True)
                if not all(map(math.isfinite, part))
            ]
        weights_N = torch.zeros_like(logprobs_N).masked_fill(in_loss_N, 1.0).detach()
        if normaliser.tokens == 0:
            return Part(0.0, Tally(), bad, parts, split(weights_N, rows.lengths_B), routes)
        outcome = policy_loss(inputs, self._loss, normaliser)
        if not bool(outcome.loss.isfinite()):
            bad.append("loss")
        try:
            outcome.loss.backward()  # type: ignore[no-untyped-call]
        except NotQuantizable as error:
            bad.append(f"operand: {error}")
        if outcome.weights_N is not None:
            weights_N[in_loss_N] = outcome.weights_N
        return Part(
            float(outcome.loss.detach()), outcome.tally, bad, parts, split(weights_N, rows.lengths_B), routes
        )

    # ---- files ------------------------------------------------------------------------------------------
    def export(self, folder: Path, base: bool = True) -> dict[str, str]:
        live = self._need()
        broken = live.non_finite_weights()
        if broken:
            raise NonFiniteWeights(f"not exported: {', '.join(broken)} non-finite")
        dtype = torch.bfloat16 if self._contract.trainer.parameters == "bf16" else torch.float32
        try:
            return live.export(folder, dtype, base, self._need_numerics().exports)
        except NotQuantizable as error:
            raise NonFiniteWeights(f"not exported: {error}") from None

    def save(self, folder: Path) -> None:
        self._need().write(folder, durable=True)

    def load(self, folder: Path) -> None:
        self._need().read(folder)

"""One rank's part of an engine: what every rank does on each command, rank 0 as well.

All ranks call the same methods in the same order with the same arguments; what only one of them knows travels back in
its `Answer`. A refusal (`ValueError`) comes before anything has changed.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from syncline.contract.job import JobSpec
from syncline.contract.sharding.grid import Rank
from syncline.trainer.engine import EngineAsleep, Sample
from syncline.trainer.engines import state
from syncline.trainer.engines.loss_inputs import loss_inputs, loss_settings
from syncline.trainer.engines.megatron import build, checkpoint, export, topology
from syncline.trainer.engines.megatron.awake import Awake
from syncline.trainer.engines.megatron.forward import Turn, nothing, run, sampled_logprobs, turns
from syncline.trainer.engines.megatron.held import Groups
from syncline.trainer.engines.megatron.library import parallel_state
from syncline.trainer.engines.megatron.wire import (
    Act,
    Answer,
    Caught,
    Micro,
    tally_fields,
    unpacked,
)
from syncline.trainer.engines.parts import split
from syncline.trainer.loss import Normaliser, policy_loss

LOGITS_BYTES = 256 << 20
"""Bound on the FP32 logits of one pass on one rank, so that a large vocabulary shrinks the micro-batch."""


class RankModel:
    """One engine on one rank. `groups`: a process group of some ranks, asked for by all of them in one order."""

    def __init__(self, spec: JobSpec, models: Path, scratch: Path, rank: Rank, groups: Groups) -> None:
        self._spec, self._models = spec, models
        self._scratch = scratch
        self._rank, self._groups = rank, groups
        self._grid = topology.grid_of(spec)
        self._loss = loss_settings(spec)
        self._awake: Awake | None = None
        self._slept = False

    def do(self, act: Act) -> Answer:
        """Carry one command out. Raises what the method raises."""
        match act.what:
            case "wake":
                return self.wake()
            case "sleep":
                return self.sleep()
            case "score":
                return self.score(unpacked(act.samples), act.flag)
            case "gradients":
                return self.gradients(unpacked(act.samples))
            case "apply":
                return self.apply(act.update)
            case "drop":
                self.need().masters.clear()
                return Answer()
            case "routes":
                return self.routes(unpacked(act.samples))
            case "export":
                return export.write(
                    self.need(), self._rank, Path(act.folder), self._spec.contract(), act.flag
                )
            case "save":
                checkpoint.write(self.need(), self._rank, Path(act.folder), durable=True)
                return Answer()
            case "load":
                checkpoint.read(self.need(), self._rank, Path(act.folder))
                return Answer()

    def need(self) -> Awake:
        """What the rank holds. Raises `EngineAsleep`."""
        if self._awake is None:
            raise EngineAsleep("the engine is asleep: wake it first")
        return self._awake

    # ---- memory -----------------------------------------------------------------------------------------
    def wake(self) -> Answer:
        """Take memory: the model, or the state that `sleep` put away."""
        if self._awake is None:
            awake = Awake(self._spec, self._models, self._grid, self._rank, self._groups)
            if self._slept:
                checkpoint.read(awake, self._rank, self._scratch)
            elif self._rank.index == 0:
                shutil.rmtree(self._scratch, ignore_errors=True)  # a dead process's sleep is no checkpoint
            self._awake = awake
        return Answer(model=self.need().facts())

    def sleep(self) -> Answer:
        """Put the state on disk and give memory back."""
        if self._awake is not None:
            self._scratch.mkdir(parents=True, exist_ok=True)
            checkpoint.write(self._awake, self._rank, self._scratch, durable=False)
            self._slept, self._awake = True, None
            state.return_memory()
        return Answer()

    # ---- passes -----------------------------------------------------------------------------------------
    def _turns(self, samples: Sequence[Sample]) -> list[Turn]:
        cells = min(self._spec.batch.micro_tokens, max(1, LOGITS_BYTES // (4 * self.need().vocab)))
        return turns(samples, cells, self._grid, parallel_state.get_data_parallel_rank(), build.device())

    def score(self, samples: Sequence[Sample], as_rollout: bool) -> Answer:
        """Log-probs of every sample, from the last stage."""
        awake = self.need()
        micros: list[Micro] = []

        def take(turn: Turn, logits_BTV: Tensor) -> Tensor:
            if turn.rows is not None:
                logprobs_N, _ = sampled_logprobs(turn, logits_BTV, awake.vocab)
                micros.append(Micro(turn.indices, _bytes(split(logprobs_N, turn.rows.lengths_B))))
            return nothing(logits_BTV)

        replay = self._spec.trainer.router_replay and not as_rollout
        with awake.as_rollout() if as_rollout else nullcontext():
            run(
                awake.model,
                self._turns(samples),
                take,
                lambda t: awake.routers.around(t, replay, False, []),
                False,
            )
        return self._said(micros, [])

    def routes(self, samples: Sequence[Sample]) -> Answer:
        """Free choices of this rank's routers."""
        awake = self.need()
        caught: list[Caught] = []
        run(
            awake.model,
            self._turns(samples),
            lambda _, logits: nothing(logits),
            lambda t: awake.routers.around(t, False, True, caught),
            False,
        )
        return self._said([], caught)

    def gradients(self, samples: Sequence[Sample]) -> Answer:
        """Forward, loss and backward over all samples; gradients are then summed over the replicas."""
        awake = self.need()
        awake.masters.clear()
        normaliser = Normaliser.over(self._spec.loss.normaliser, [sum(s.loss_mask) for s in samples])
        passes = self._turns(samples)
        reference = self._reference_logprobs(passes)
        awake.routers.forget()
        awake.quantised.begin()
        recorded = any(s.routes is not None for s in samples)
        micros: list[Micro] = []
        caught: list[Caught] = []

        def take(turn: Turn, logits_BTV: Tensor) -> Tensor:
            if turn.rows is None:
                return nothing(logits_BTV)
            loss, micro = self._take(turn, logits_BTV, normaliser, reference)
            micros.append(micro)
            return loss

        replay = self._spec.trainer.router_replay
        run(awake.model, passes, take, lambda t: awake.routers.around(t, replay, recorded, caught), True)
        bad: list[str] = []
        if normaliser.tokens:
            bad = [self._named(name) for name in awake.masters.reduce()]
        else:
            awake.masters.clear()
        said = self._said(micros, caught)
        return Answer(
            micros=said.micros,
            caught=said.caught,
            bad=tuple(bad),
            held=self._held(awake),
            ran=awake.quantised.ran(),
            unreadable=awake.quantised.unreadable(),
        )

    def _take(
        self, turn: Turn, logits_BTV: Tensor, normaliser: Normaliser, reference: dict[int, Tensor]
    ) -> tuple[Tensor, Micro]:
        """The share of the loss of one pass, and what is told of it."""
        rows = turn.rows
        assert rows is not None
        logprobs_N, entropy_N = sampled_logprobs(turn, logits_BTV, self.need().vocab)
        in_loss_N, inputs = loss_inputs(
            rows.lengths_B, turn.samples, logprobs_N, entropy_N, reference.get(turn.indices[0])
        )
        parts = split(logprobs_N.detach(), rows.lengths_B)
        bad = [
            f"logprobs of {s.trajectory}"
            for s, part in zip(turn.samples, parts, strict=True)
            if not bool(torch.tensor(part).isfinite().all())
        ]
        weights_N = torch.zeros_like(logprobs_N).masked_fill(in_loss_N, 1.0).detach()
        loss, tally = nothing(logits_BTV), {}
        if normaliser.tokens:
            outcome = policy_loss(inputs, self._loss, normaliser)
            loss, tally = outcome.loss, tally_fields(outcome.tally)
            if not bool(loss.isfinite()):
                bad.append("loss")
            if outcome.weights_N is not None:
                weights_N[in_loss_N] = outcome.weights_N
        return loss, Micro(
            turn.indices,
            _bytes(parts),
            _bytes(split(weights_N, rows.lengths_B)),
            array("d", [float(loss.detach())]).tobytes(),
            tally,
            tuple(bad),
        )

    def _reference_logprobs(self, passes: Sequence[Turn]) -> dict[int, Tensor]:
        """First index of a turn -> the reference policy's log-probs [N] on the last stage; empty without KL."""
        awake = self.need()
        out: dict[int, Tensor] = {}

        def take(turn: Turn, logits_BTV: Tensor) -> Tensor:
            if turn.rows is not None:
                out[turn.indices[0]] = sampled_logprobs(turn, logits_BTV, awake.vocab)[0]
            return nothing(logits_BTV)

        if self._loss.kl > 0:
            with awake.as_reference() as model:
                run(model, passes, take, lambda _: nullcontext(), False)
        return out

    def apply(self, update: int) -> Answer:
        """The optimizer's step on the gradients that are there."""
        awake = self.need()
        norm = awake.masters.apply(update)
        return Answer(norm=norm, bad=self._broken(awake), held=self._held(awake))

    def _broken(self, awake: Awake) -> tuple[str, ...]:
        return tuple(self._named(name) for name in awake.masters.broken())

    def _named(self, name: str) -> str:
        """A parameter of this rank, with the checkpoint tensors that it is made of."""
        pieces = self.need().part.shards[name].pieces
        return f"{', '.join(sorted({p.source for p in pieces if p.source}))} on {self._rank}"

    def _said(self, micros: Sequence[Micro], caught: Sequence[Caught]) -> Answer:
        """Of tensor-parallel ranks all know the same: the first tells."""
        last = parallel_state.is_pipeline_last_stage() and self._rank.tp == 0
        return Answer(micros=tuple(micros) if last else (), caught=tuple(caught))

    def _held(self, awake: Awake) -> dict[str, int]:
        masters = list(awake.masters.owned.values())
        every = dict(awake.model.named_parameters())
        adapter = [] if awake.lora is None else list(awake.lora.parameters.values())
        held = {
            "master": _nbytes(masters),
            "moments": _nbytes(awake.masters.moments()),
            "gradients": _nbytes([p.grad for p in every.values() if p.grad is not None]),
            "wide": _nbytes(list(every.values())) - _nbytes(adapter),
        }
        return held | ({"adapter": _nbytes(adapter)} if awake.lora is not None else {})


def _bytes(parts: Sequence[array[float]]) -> list[bytes]:
    return [part.tobytes() for part in parts]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)

"""Level 7: one deterministic training step on fixed trajectories. Gradients, moments and masters, tensor by tensor.

The trainer's gradient is read back from AdamW's first moment, so that what is compared is what reached the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from syncline.contract.precision import Gemm, Trainer
from syncline.lab.ladder import textbook
from syncline.lab.ladder.records import Check, same
from syncline.lab.ladder.subject import Subject, learn
from syncline.trainer.engines.state import OPTIMIZER, WEIGHTS

EXACT = 2e-4
"""Of a tensor's gradient: FP32 additions in another order, forward and back."""
ROUNDED = 3.0
"""Times what codes in DGrad and WGrad do to a tensor's gradient: how far other blocks may be. Along tokens the
trainer's hold a micro-batch and the textbook's one trajectory: two draws of the same noise, a root of two apart."""
FLIPPED = 0.1
"""Of what codes of FProp's activations do to a tensor's gradient: a sum in another order moves a value across the
edge between two codes now and then. One in 400 of them, a whole step each, makes a tenth of all by half a step."""
SMALL = 1e-2
"""Share of the whole gradient under which a tensor's own is compared with that share: it is noise."""
UPDATED = 1e-6
"""Relative: AdamW in FP32 against FP64."""


def checks(subject: Subject) -> Iterator[Check]:
    """The step twice, its gradient, its update, what must not move, and the dtypes of what is kept."""
    start = _save(subject, "start")
    once = _step(subject, start, "once")
    again = _step(subject, start, "again")
    subject.pair.trainer.load(start)
    advantages = [record.index % 2 - 0.5 for record in subject.records]
    contract = subject.contract.trainer
    wanted, *less = (textbook.gradients(subject, subject.records, advantages, how) for how in _hows(contract))
    before, after, twice = _State(start), _State(once), _State(again)
    yield same("the step repeats to the last bit", _unequal(after, twice), "one order of additions")
    yield same("masters and moments are FP32", _narrow(after), "trainer.master and trainer.moments")
    yield _gradient(subject, before, after, wanted, _allowed(wanted, less))
    yield _update(subject, before, after)
    frozen = sorted(set(_names(after)) - set(wanted)) if subject.contract.adapter is not None else []
    yield same("the frozen base has no moments", frozen, "seed section 5.1")


class _State:
    """Masters and optimizer state of a saved trainer."""

    def __init__(self, folder: Path) -> None:
        self.weights = load_file(folder / WEIGHTS)
        self.optimizer = load_file(folder / OPTIMIZER)

    def master(self, name: str) -> Tensor:
        return self.weights[f"parameter.{name}"]

    def moment(self, kind: str, name: str) -> Tensor:
        return self.optimizer[f"{kind}.{name}"]


def _save(subject: Subject, what: str) -> Path:
    folder = subject.new_folder(what)
    subject.pair.trainer.save(folder)
    return folder


def _step(subject: Subject, start: Path, what: str) -> Path:
    pair, updates = subject.pair, subject.pair.updates
    pair.trainer.load(start)
    learn(pair, subject.records)
    pair.updates = updates
    return _save(subject, what)


def _names(state: _State) -> list[str]:
    return [name.removeprefix("exp_avg.") for name in state.optimizer if name.startswith("exp_avg.")]


def _unequal(one: _State, other: _State) -> list[str]:
    return [
        name
        for a, b in ((one.weights, other.weights), (one.optimizer, other.optimizer))
        for name in a
        if not torch.equal(a[name], b[name])
    ]


def _hows(stated: Trainer) -> list[Trainer]:
    """What the contract states; the same with a backward that reads what FProp read; and with wide activations too."""
    read = replace(
        stated,
        dgrad=Gemm(right="original" if stated.fprop.right == "original" else "reconstructed"),
        wgrad=Gemm(right="original" if stated.fprop.left == "original" else "reconstructed"),
    )
    wide = replace(read, fprop=replace(stated.fprop, left="original"), wgrad=Gemm())
    return [stated, read, wide]


def _allowed(wanted: Mapping[str, Tensor], less: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Norm by which each tensor's gradient may be off."""
    read, wide = less
    return {
        name: ROUNDED * float((read[name] - grad).norm()) + FLIPPED * float((wide[name] - read[name]).norm())
        for name, grad in wanted.items()
    }


def _gradient(
    subject: Subject,
    before: _State,
    after: _State,
    wanted: Mapping[str, Tensor],
    allowed: Mapping[str, float],
) -> Check:
    beta = subject.spec.optimizer.betas[0]
    whole = sum(float(grad.norm()) ** 2 for grad in wanted.values()) ** 0.5
    worst, bound, where = 0.0, EXACT, ""
    for name, grad in wanted.items():
        if f"exp_avg.{name}" not in after.optimizer:
            continue
        found = (after.moment("exp_avg", name) - beta * before.moment("exp_avg", name)) / (1 - beta)
        norm = max(float(grad.norm()), SMALL * whole)
        apart = float((found - grad).norm()) / norm
        most = EXACT + allowed[name] / norm
        if not apart / most <= worst / bound:
            worst, bound, where = apart, most, name
    return Check(
        name="gradient of each tensor against the textbook's",
        found=worst,
        bound=bound,
        source=_source(subject),
        unit="of its norm",
        where="" if worst <= bound else where,
    )


def _source(subject: Subject) -> str:
    how, said = subject.contract.trainer, ["FP32 additions in another order, forward and back"]
    if {"codes", "requantised"} & {how.dgrad.left, how.dgrad.right, how.wgrad.left, how.wgrad.right}:
        said.append(f"{ROUNDED:g} times what codes in DGrad and WGrad do to it")
    if how.fprop.left != "original":
        said.append(f"{FLIPPED:g} of what codes of activations do to it")
    return "; ".join(said)


def _update(subject: Subject, before: _State, after: _State) -> Check:
    """Masters after the step against AdamW's formula on the moments that were saved."""
    spec = subject.spec.optimizer
    worst, where = 0.0, ""
    for name in _names(after):
        step = int(after.moment("step", name))
        rate = spec.lr * min(1.0, (subject.pair.updates + 1) / spec.warmup) if spec.warmup else spec.lr
        m, v = after.moment("exp_avg", name), after.moment("exp_avg_sq", name)
        wanted = textbook.adamw(
            before.master(name), m, v, step, lr=rate, betas=spec.betas, decay=spec.weight_decay
        )
        apart = float((after.master(name).double() - wanted).abs().max() / before.master(name).abs().max())
        if not apart <= worst:
            worst, where = apart, name
    return Check(
        name="masters after the step against AdamW's formula",
        found=worst,
        bound=UPDATED,
        source="AdamW in FP32 against FP64",
        unit="of the largest weight",
        where="" if worst <= UPDATED else where,
    )


def _narrow(state: _State) -> list[str]:
    """What has another dtype than FP32, or has it and holds nothing that BF16 could not."""
    kept = {n: t for n, t in state.optimizer.items() if n.startswith("exp_avg")}
    kept |= {n: t for n, t in state.weights.items() if n.startswith("parameter.") and _moves(state, n)}
    wrong = []
    for name, tensor in kept.items():
        if tensor.dtype != torch.float32:
            wrong.append(f"{name} is {tensor.dtype}")
        elif bool(tensor.any()) and torch.equal(tensor, tensor.bfloat16().float()):
            wrong.append(f"{name} holds BF16 values")
    return wrong


def _moves(state: _State, parameter: str) -> bool:
    """Whether an optimizer step changes it."""
    moment = state.optimizer.get(f"exp_avg.{parameter.removeprefix('parameter.')}")
    return moment is not None and bool(moment.any())

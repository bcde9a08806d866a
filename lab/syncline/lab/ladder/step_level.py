"""Level 7: one deterministic training step on fixed trajectories. Gradients, moments and masters, tensor by tensor.

The trainer's gradient is read back from AdamW's first moment, so that what is compared is what reached the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from syncline.lab.ladder import textbook
from syncline.lab.ladder.records import Check, same
from syncline.lab.ladder.subject import Subject, learn
from syncline.trainer.engines.state import OPTIMIZER, WEIGHTS

EXACT = 2e-4
"""Of a tensor's gradient: FP32 additions in another order, forward and back."""
ROUNDED = 0.15
"""Of a tensor's gradient where DGrad or WGrad read codes: two roundings of E4M3 and their mean over a product."""
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
    wanted = textbook.gradients(subject, subject.records, [r.index % 2 - 0.5 for r in subject.records])
    before, after, twice = _State(start), _State(once), _State(again)
    yield same("the step repeats to the last bit", _unequal(after, twice), "one order of additions")
    yield _gradient(subject, before, after, wanted)
    yield _update(subject, before, after)
    frozen = sorted(set(_names(after)) - set(wanted)) if subject.contract.adapter is not None else []
    yield same("the frozen base has no moments", frozen, "seed section 5.1")
    yield same("masters and moments are FP32", _narrow(after), "trainer.master and trainer.moments")


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


def _gradient(subject: Subject, before: _State, after: _State, wanted: Mapping[str, Tensor]) -> Check:
    beta = subject.spec.optimizer.betas[0]
    whole = sum(float(grad.norm()) ** 2 for grad in wanted.values()) ** 0.5
    worst, where = 0.0, ""
    for name, grad in wanted.items():
        if f"exp_avg.{name}" not in after.optimizer:
            continue
        found = (after.moment("exp_avg", name) - beta * before.moment("exp_avg", name)) / (1 - beta)
        apart = float((found - grad).norm()) / max(float(grad.norm()), SMALL * whole)
        if not apart <= worst:
            worst, where = apart, name
    bound, source = _bound(subject)
    return Check(
        name="gradient of each tensor against the textbook's",
        found=worst,
        bound=bound,
        source=source,
        unit="of its norm",
        where="" if worst <= bound else where,
    )


def _bound(subject: Subject) -> tuple[float, str]:
    trainer = subject.contract.trainer
    read = (trainer.dgrad.left, trainer.dgrad.right, trainer.wgrad.left, trainer.wgrad.right)
    if {"codes", "requantised"} & set(read):
        return ROUNDED, "DGrad and WGrad read codes, the textbook's gradients are wide"
    return EXACT, "FP32 additions in another order, forward and back"


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
    kept = {n: t for n, t in state.optimizer.items() if n.startswith("exp_avg")}
    kept |= {n: t for n, t in state.weights.items() if n.startswith("parameter.")}
    return [f"{name} is {tensor.dtype}" for name, tensor in kept.items() if tensor.dtype != torch.float32]

"""Proof of activation: a known change of the trainer's weights must move the engine's scores as it moves the trainer's.

For validation alone. The perturbed version is published to a pair's own engine, which serves no job; weights that serve
are never perturbed, and the pair serves its unperturbed weights again when this is over. Where the engine keeps
anything of the version before (a buffer that was not written, a scale that was derived and not made anew), its scores
do not move by what the trainer predicts.

Legend: T scored tokens of all records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from shutil import copytree

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from syncline.contract.token_path import Trajectory
from syncline.lab.measure import Scores, flat
from syncline.lab.pair import Pair
from syncline.trainer.engines.state import WEIGHTS

FAR = 10.0  # times the same-version gap by which a perturbation must move the scores to prove anything
NEAR = 3.0  # times the same-version gap that what is found may be from what was predicted
FLOOR = 1e-5  # nats: two FP32 sums in another order


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What a perturbation did. Means over T tokens, in nats."""

    tensors: tuple[str, ...]  # trainer's parameters that were changed
    gap: float  # |trainer - rollout| of the unperturbed version
    predicted: float  # |change| of the trainer's scores
    found: float  # |change| of the engine's scores
    apart: float  # |change of the engine's - change of the trainer's|, token by token
    restored: bool  # the engine scores the unperturbed weights again as before, to the last bit

    def problem(self) -> str:
        """Why this proves no activation; "": it does."""
        gap = max(self.gap, FLOOR)
        if self.predicted < FAR * gap:
            return f"the perturbation moves scores by {self.predicted:g}, too little beside a gap of {gap:g}"
        if self.apart > NEAR * gap:
            return (
                f"scores moved by {self.found:g} and not as predicted: {self.apart:g} off, the gap is {gap:g}"
            )
        return "" if self.restored else "the unperturbed weights do not score as they did before"


def prove(
    pair: Pair,
    records: Sequence[Trajectory],
    folder: Path,
    match: str = "*_proj*",
    strength: float = 0.05,
    scores: Callable[[], tuple[Scores, Scores]] | None = None,
) -> Proof:
    """Perturb parameters that `match`, publish to the pair's own engine, compare, and publish the old weights again.

    pair       with a version published; its trainer's state and weights are as before afterwards
    records    whose sampled tokens are scored
    folder     for the trainer's state, new
    strength   of the perturbation, relative to each tensor's own mean magnitude
    scores     the trainer's as rollout multiplies, and rollout's, of the records; None: as the pair scores them

    Takes two version numbers. Raises `ValueError` if requests run on the engine, or no parameter matches.
    """
    if pair.rollout.running:
        raise ValueError(
            f"{pair.rollout.running} requests run: a perturbation is for an engine out of rotation"
        )
    both = scores or (lambda: (pair.score_trainer(records, as_rollout=True), pair.score_rollout(records)))
    trainer, rollout = map(_T, both())
    with _perturbed(pair, folder, match, strength) as names:
        _publish(pair)
        told, found = map(_T, both())
    _publish(pair)
    again = _T(both()[1])
    return Proof(
        tensors=names,
        gap=_mean(trainer - rollout),
        predicted=_mean(told - trainer),
        found=_mean(found - rollout),
        apart=_mean((found - rollout) - (told - trainer)),
        restored=bool(np.array_equal(again, rollout)),
    )


@contextmanager
def _perturbed(pair: Pair, folder: Path, match: str, strength: float) -> Iterator[tuple[str, ...]]:
    """The trainer with other weights while the block runs, by its own way of saving and loading."""
    before, other = folder / "before", folder / "perturbed"
    before.mkdir(parents=True)
    pair.trainer.save(before)
    copytree(before, other)
    tensors = load_file(other / WEIGHTS)
    names = tuple(name for name in tensors if name.startswith("parameter.") and fnmatch(name, match))
    if not names:
        raise ValueError(f"no trained parameter matches {match!r}")
    generator = torch.Generator().manual_seed(0)
    for name in names:
        noise = torch.randn(tensors[name].shape, generator=generator)
        tensors[name] += strength * tensors[name].abs().mean() * noise
    save_file(tensors, other / WEIGHTS)
    pair.trainer.load(other)
    try:
        yield names
    finally:
        pair.trainer.load(before)


def _publish(pair: Pair) -> None:
    pair.updates += 1
    pair.publish()


def _T(parts: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.array(flat(parts), np.float64)


def _mean(difference_T: NDArray[np.float64]) -> float:
    return float(np.abs(difference_T).mean())

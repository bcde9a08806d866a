"""One cell of a study: one trainer variant with one seed, trained from random weights in lock-step.

`python -m syncline.lab.cell ORDER RESULT` is how a study starts one: a process per cell, one thread each. It writes
RESULT whole or not at all, and tells its progress on stdout as a line per update: `12 0.3105`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syncline.contract.job import JobSpec, PrecisionSpec
from syncline.lab.measure import behaviour, gap, reference_kl
from syncline.lab.pair import Pair, Trained, one_thread, samples
from syncline.lab.records import Cell, Order, Point
from syncline.lab.task import write_models
from syncline.runtime.durable import write_whole
from syncline.trainer.engine import TrainerEngine, build_engine

MEMORY = "/dev/shm"
"""Versions and exports are synced to disk tensor by tensor, which took a third of an update; a cell's are needed by
nobody after it, so where there is a file system in memory they go there (about 2 MB)."""


class CellSkipped(RuntimeError):
    """An update of a cell trained nothing, so the comparison is void. The message says what was not finite."""


class References:
    """Two BF16 policies that score what the trainer scored: its weights of the moment, and the initial ones."""

    def __init__(self, spec: JobSpec, models: Path, folder: Path) -> None:
        wide = spec.model_copy(update={"precision": PrecisionSpec()})
        self._same: TrainerEngine = build_engine(wide, models, folder / "same")
        self._initial: TrainerEngine = build_engine(wide, models, folder / "initial")
        self._state = folder / "state"
        self._state.mkdir(parents=True)
        self._same.wake()
        self._initial.wake()

    def follow(self, trainer: TrainerEngine) -> None:
        """Take the trainer's present weights; call before its step."""
        trainer.save(self._state)
        self._same.load(self._state)

    def compare(self, trained: Trained) -> tuple[float, float]:
        """(kl_same, kl_initial) of the trainer's log-probs before the step."""
        scored = samples([row.trajectory for row in trained.rows])
        policy = trained.result.logprobs
        return (
            reference_kl(policy, self._same.score(scored)),
            reference_kl(policy, self._initial.score(scored)),
        )


def run(order: Order, folder: Path, tell: Callable[[Point], None]) -> Cell:
    """Train the cell in the empty `folder`. Raises `CellSkipped`, and what engines raise."""
    began = time.monotonic()
    spec, models = order.spec(), folder / "models"
    write_models(models)
    pair = Pair(spec, models, folder / "pair")
    references = References(spec, models, folder / "references")
    points = []
    for update in range(1, order.updates + 1):
        pair.publish()
        first = (update - 1) * order.groups
        records = pair.sample(range(first, first + order.groups), order.group_size)
        measured = update % order.every == 0 or update == order.updates
        if measured:
            references.follow(pair.trainer)
        trained = pair.train(records, pair.rewards(records))
        point = _point(update, trained, references.compare(trained) if measured else (None, None))
        points.append(point)
        tell(point)
    return Cell(
        key=order.key(),
        order=order,
        contract=spec.contract_digest(),
        points=tuple(points),
        seconds=time.monotonic() - began,
    )


def _point(update: int, trained: Trained, kl: tuple[float | None, float | None]) -> Point:
    rows, result = trained.rows, trained.result
    if result.skipped or result.grad_norm is None:
        named = ", ".join(result.non_finite) or "no token in the loss"
        raise CellSkipped(f"update {update} was skipped: {named}")
    rewards = [row.reward.value for row in rows if row.reward is not None and row.reward.value is not None]
    return Point(
        update=update,
        reward=sum(rewards) / len(rewards),
        gap=gap(result.logprobs, behaviour([row.trajectory for row in rows])),
        clip=result.tally.clipped / result.tally.tokens,
        grad_norm=result.grad_norm,
        entropy=result.tally.entropy / result.tally.tokens,
        kl_same=kl[0],
        kl_initial=kl[1],
    )


class StudyGone(RuntimeError):
    """The process that asked for this cell has ended: nobody waits for it."""


def main(order: str, result: str) -> None:
    """See the module."""
    one_thread()
    parent = os.getppid()

    def tell(point: Point) -> None:
        if os.getppid() != parent:
            raise StudyGone(f"update {point.update}: the study has ended")
        sys.stdout.write(f"{point.update} {point.reward:.4f}\n")
        sys.stdout.flush()

    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="syncline-cell-", dir=memory) as scratch:
        cell = run(msgspec.json.decode(order, type=Order), Path(scratch), tell)
    write_whole(Path(result), msgspec.json.encode(cell))


if __name__ == "__main__":
    main(*sys.argv[1:])

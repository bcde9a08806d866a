"""One cell of a study: one trainer variant with one seed, trained from random weights in lock-step.

`python -m syncline.lab.cell ORDER RESULT` is how a study starts one: a process per cell, one thread each. It writes
RESULT whole or not at all, and tells its progress on stdout as a line per update: `12 0.3105`.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syncline.contract.job import JobSpec, PrecisionSpec
from syncline.lab.measure import Gap, behaviour, gap, reference_kl
from syncline.lab.pair import Pair, Trained, one_thread, samples
from syncline.lab.task import CONFIGS, Architecture, sort_spec, write_models
from syncline.runtime.durable import write_whole
from syncline.trainer.engine import TrainerEngine, build_engine

MEASURES = 1
"""Rises when a cell of the same order would measure something else, so that older results are not mixed in."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What one cell is. `variant` "unquantised" is the yardstick: recipe bf16 on both sides.

    every   updates between comparisons with the BF16 references
    """

    recipe: str
    variant: str
    seed: int
    updates: int
    architecture: Architecture = "dense"
    groups: int = 32
    group_size: int = 16
    every: int = 5

    def spec(self) -> JobSpec:
        """The cell's job."""
        plain = self.variant == "unquantised"
        return sort_spec(
            self.architecture,
            recipe="bf16" if plain else self.recipe,
            variant="contract" if plain else self.variant,
            seed=self.seed,
            updates=self.updates,
            groups=self.groups,
            group_size=self.group_size,
        )

    def key(self) -> str:
        """sha256 hex of all that decides the result, apart from code: spec, contract, model, measures."""
        spec = self.spec()
        parts = (spec.hash(), spec.contract_digest(), CONFIGS[self.architecture], self.every, MEASURES)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One update. `gap` is same-version: every token was sampled by the version that is being updated.

    kl_same     trainer's policy against the BF16 forward of the same weights; None: not measured at this update
    kl_initial  trainer's policy against the initial BF16 policy; None: not measured at this update
    """

    update: int
    reward: float
    gap: Gap
    clip: float
    grad_norm: float
    entropy: float
    kl_same: float | None = None
    kl_initial: float | None = None


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A finished cell. `seconds`: wall clock of its updates."""

    key: str
    order: Order
    contract: str
    points: tuple[Point, ...]
    seconds: float


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


def finished(path: Path, order: Order) -> Cell | None:
    """The result at `path` if it is a whole one of this very order, else None."""
    if not path.is_file():
        return None
    try:
        cell = msgspec.json.decode(path.read_bytes(), type=Cell)
    except msgspec.MsgspecError:  # of an older shape
        return None
    return cell if cell.key == order.key() and len(cell.points) == order.updates else None


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

    with tempfile.TemporaryDirectory(prefix="syncline-cell-") as scratch:
        cell = run(msgspec.json.decode(order, type=Order), Path(scratch), tell)
    write_whole(Path(result), msgspec.json.encode(cell))


if __name__ == "__main__":
    main(*sys.argv[1:])

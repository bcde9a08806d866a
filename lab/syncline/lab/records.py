"""What a study orders and what comes back, as it lies on disk. Without torch, so that whoever only reads is quick."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from syncline.contract.job import JobSpec
from syncline.lab.task import CONFIGS, Architecture, sort_spec

MEASURES = 1
"""Rises when a cell of the same order would measure something else, so that older results are not mixed in."""


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """|log-prob difference| over tokens, and the divergence that the same pairs estimate.

    exact   share of tokens whose two log-probs are the same FP32 number
    kl      k3 estimate of KL(rollout, trainer): the tokens are the rollout's, so this way round it is unbiased
    """

    tokens: int
    mean: float
    median: float
    p99: float
    max: float
    exact: float
    kl: float


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


def finished(path: Path, order: Order) -> Cell | None:
    """The result at `path` if it is a whole one of this very order, else None."""
    if not path.is_file():
        return None
    try:
        cell = msgspec.json.decode(path.read_bytes(), type=Cell)
    except msgspec.MsgspecError:  # of an older shape
        return None
    return cell if cell.key == order.key() and len(cell.points) == order.updates else None

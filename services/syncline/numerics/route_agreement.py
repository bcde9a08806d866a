"""Do two sides route alike? Pure functions on expert ids, shared by router replay and the diagnostics.

Legend: B rows, T columns, N tokens, L routing layers, K experts per token. Ids are integers; the order inside K has
no meaning here: a token is routed alike in a layer if the *sets* of its ids are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_SIGMAS = 4.0
"""By how many standard deviations of a fair coin a shifted record must fit better before it is called shifted."""


def same_sets(left_NLK: Tensor, right_NLK: Tensor) -> Tensor:
    """Whether the sets of ids are equal, bool [N, L]. Raises `ValueError` naming both shapes if they differ."""
    if left_NLK.shape != right_NLK.shape or left_NLK.dim() != 3:
        raise ValueError(
            f"expert ids of shapes {list(left_NLK.shape)} and {list(right_NLK.shape)}: "
            "both must be [tokens, layers, topk]"
        )
    left, right = (ids.long().sort(dim=-1).values for ids in (left_NLK, right_NLK))
    return (left == right).all(dim=-1)


def route_agreement(left_NLK: Tensor, right_NLK: Tensor) -> Tensor:
    """Share of tokens whose set of ids is equal, per layer, float64 [L]; NaN where there is no token."""
    return same_sets(left_NLK, right_NLK).double().mean(dim=0)


def first_diverging_layer(left_NLK: Tensor, right_NLK: Tensor) -> Tensor:
    """The first layer (counted among routing layers) whose sets differ, per token, int64 [N]; -1: none does."""
    differs_NL = ~same_sets(left_NLK, right_NLK)
    return torch.where(differs_NL.any(dim=1), differs_NL.int().argmax(dim=1), -1)


@dataclass(frozen=True)
class RouteCounts:
    """Agreement of many tokens as counts, so that parts of a batch add up exactly.

    equal   [L] tokens whose set of ids is equal in the layer
    first   [L] tokens that diverge in this layer for the first time
    pairs   (token, layer) cells whose neighbouring token has a record too
    late    cells that would be mended, broken, and kept alike, if the record stood one token earlier
    early   the same if it stood one token later
    """

    tokens: int
    equal: tuple[int, ...]
    first: tuple[int, ...]
    pairs: int = 0
    late: tuple[int, ...] = (0, 0, 0)
    early: tuple[int, ...] = (0, 0, 0)

    @classmethod
    def of(cls, free_NLK: Tensor, recorded_NLK: Tensor) -> Self:
        """Counts of one trajectory: N are its tokens in order."""
        lengths_B = torch.tensor([len(free_NLK)])
        return cls.of_rows(free_NLK[None], recorded_NLK[None], lengths_B)[0]

    @classmethod
    def of_rows(cls, free_BTLK: Tensor, recorded_BTLK: Tensor, lengths_B: Tensor) -> list[Self]:
        """Counts of each row of a batch that is padded on the right; the first `lengths_B` tokens count."""
        rows, columns, layers = free_BTLK.shape[:3]
        same_BTL = same_sets(free_BTLK.flatten(0, 1), recorded_BTLK.flatten(0, 1)).reshape(
            rows, columns, layers
        )
        real_BT1 = (torch.arange(columns) < lengths_B[:, None])[..., None]
        broken_BTL = (~same_BTL).cumsum(dim=2)
        first_BTL = ~same_BTL & (broken_BTL == 1)
        pairs_BT1 = real_BT1[:, 1:]  # neighbours, both of them real
        late_B3 = _moved(same_BTL[:, :-1], free_BTLK[:, :-1], recorded_BTLK[:, 1:], pairs_BT1)
        early_B3 = _moved(same_BTL[:, 1:], free_BTLK[:, 1:], recorded_BTLK[:, :-1], pairs_BT1)
        pairs_B = pairs_BT1.sum((1, 2)) * layers
        parts = ((same_BTL & real_BT1).sum(1), (first_BTL & real_BT1).sum(1), pairs_B, late_B3, early_B3)
        lists = zip(lengths_B.tolist(), *(part.tolist() for part in parts), strict=True)
        return [
            cls(tokens, tuple(equal), tuple(first), pairs, tuple(late), tuple(early))
            for tokens, equal, first, pairs, late, early in lists
        ]

    def __add__(self, other: RouteCounts) -> RouteCounts:
        """Both together. Raises `ValueError` if they are of different numbers of layers."""
        if len(self.equal) != len(other.equal):
            raise ValueError(f"counts of {len(self.equal)} and of {len(other.equal)} routing layers")
        return RouteCounts(
            self.tokens + other.tokens,
            _sum(self.equal, other.equal),
            _sum(self.first, other.first),
            self.pairs + other.pairs,
            _sum(self.late, other.late),
            _sum(self.early, other.early),
        )

    @property
    def agreement(self) -> tuple[float, ...]:
        """Share of tokens routed alike, per layer; NaN where there is no token."""
        return tuple(equal / self.tokens if self.tokens else math.nan for equal in self.equal)

    @property
    def shifted(self) -> bool:
        """Whether the record fits one token off, and far better there than where it stands.

        "Fits": in more than half of the cells. "Far better": by a sign test over the cells on which the two
        placements disagree. Routes that the trainer has left behind by large steps fit nowhere, and are not shifted.
        """
        return any(
            mended + kept > self.pairs / 2 and mended - broken > _SIGMAS * math.sqrt(mended + broken)
            for mended, broken, kept in (self.late, self.early)
        )


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _moved(straight_BTL: Tensor, free_BTLK: Tensor, recorded_BTLK: Tensor, real_BT1: Tensor) -> Tensor:
    """Real cells that the shift mends, breaks and keeps alike, per row, int64 [B, 3]."""
    shifted = same_sets(free_BTLK.flatten(0, 1), recorded_BTLK.flatten(0, 1)).reshape(straight_BTL.shape)
    parts = (shifted & ~straight_BTL, straight_BTL & ~shifted, shifted & straight_BTL)
    return torch.stack([(part & real_BT1).sum((1, 2)) for part in parts], dim=1)

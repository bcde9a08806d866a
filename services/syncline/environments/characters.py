"""Character games that a model with random weights learns within a minute: reverse, copy, sort, successor.

The prompt is `reverse:hca=` and the right response `ach`. Items are endless and drawn from `(seed, index)`.
The reward is dense: the share of right positions, counted over the longer of response and answer, so that a
character too many or too few costs as much as a wrong one.
"""

from __future__ import annotations

import random
from typing import Annotated, Literal

import msgspec

from syncline.contract.job import Problem
from syncline.environments.options import PATH
from syncline.environments.turns import Prompt, SingleTurn, require_index

LEGAL = "abcdefghijklmnopqrstuvwxyz0123456789"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`length` symbols of `alphabet` per item; `sort` and `successor` take the alphabet's own order."""

    game: Literal["reverse", "copy", "sort", "successor"] = "reverse"
    length: Annotated[int, msgspec.Meta(ge=1, le=64)] = 3
    alphabet: Annotated[str, msgspec.Meta(min_length=2, max_length=36)] = "abcdefgh"


def problems(options: Options) -> list[Problem]:
    """An alphabet must be distinct lowercase letters and digits."""
    found: list[Problem] = []
    bad = sorted({symbol for symbol in options.alphabet if symbol not in LEGAL})
    if bad:
        message = f"holds {bad}, which are no lowercase letters or digits"
        found.append(Problem(path=f"{PATH}.alphabet", message=message, hint="use a-z and 0-9"))
    if len(set(options.alphabet)) != len(options.alphabet):
        twice = sorted({symbol for symbol in options.alphabet if options.alphabet.count(symbol) > 1})
        found.append(
            Problem(path=f"{PATH}.alphabet", message=f"repeats {twice}", hint="name each symbol once")
        )
    return found


class Characters(SingleTurn):
    """One character game. Pure: holds its options and the seed, and nothing else."""

    name = "characters/1"
    size = None

    def __init__(self, options: Options, seed: int) -> None:
        self.options = options
        self.seed = seed

    def prompt(self, index: int) -> Prompt:
        """`GAME:SYMBOLS=`, with the answer in `meta`."""
        symbols = self._symbols(index)
        answer = self._answer(symbols)
        return Prompt(
            index=index,
            text=f"{self.options.game}:{symbols}=",
            meta={"game": self.options.game, "symbols": symbols, "answer": answer},
        )

    def score(self, index: int, text: str) -> float:
        """Share of right positions, in [0, 1]."""
        answer = self._answer(self._symbols(index))
        right = sum(a == b for a, b in zip(answer, text, strict=False))
        return right / max(len(answer), len(text))

    def _symbols(self, index: int) -> str:
        draw = random.Random(f"{self.name}:{self.seed}:{require_index(index)}")
        return "".join(draw.choices(self.options.alphabet, k=self.options.length))

    def _answer(self, symbols: str) -> str:
        order = self.options.alphabet
        match self.options.game:
            case "reverse":
                return symbols[::-1]
            case "copy":
                return symbols
            case "sort":
                return "".join(sorted(symbols, key=order.index))
            case "successor":
                return "".join(order[(order.index(symbol) + 1) % len(order)] for symbol in symbols)

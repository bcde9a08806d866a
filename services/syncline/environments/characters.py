"""Character games that a model with random weights learns within minutes.

The prompt is `reverse:hca=` and the right response `ach`; `copy` answers `hca`, `sort` `ach`, `successor` (each
symbol's next one) `adb`. `kind` shows one symbol, `kind:7=`, and is answered by any of its kind, digits for a digit
and letters for a letter: the quickest to learn.

Items are endless and drawn from `(seed, index)`. The reward is the share of right positions, counted over the longer of
response and answer.
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
    """`length` symbols to answer with; an order of symbols is always that of `alphabet`."""

    game: Literal["reverse", "copy", "sort", "successor", "kind"] = "reverse"
    length: Annotated[int, msgspec.Meta(ge=1, le=512)] = 3
    alphabet: (
        Annotated[int, msgspec.Meta(ge=2, le=36)] | Annotated[str, msgspec.Meta(min_length=2, max_length=36)]
    ) = 8  # how many of a-z0-9, or the symbols themselves

    def symbols(self) -> str:
        """The alphabet, in order."""
        return LEGAL[: self.alphabet] if isinstance(self.alphabet, int) else self.alphabet


def problems(options: Options) -> list[Problem]:
    """An alphabet must be distinct lowercase letters and digits."""
    found, alphabet = list[Problem](), options.symbols()
    bad = sorted({symbol for symbol in alphabet if symbol not in LEGAL})
    if bad:
        message = f"holds {bad}, which are no lowercase letters or digits"
        found.append(Problem(path=f"{PATH}.alphabet", message=message, hint="use a-z and 0-9"))
    if len(set(alphabet)) != len(alphabet):
        twice = sorted({symbol for symbol in alphabet if alphabet.count(symbol) > 1})
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
        self.alphabet = options.symbols()
        self.seed = seed

    def prompt(self, index: int) -> Prompt:
        """The game and its symbols, with the answer (for `kind`, one of them) in `meta`."""
        symbols = self._symbols(index)
        meta = {"game": self.options.game, "symbols": symbols, "answer": self._answer(symbols)}
        return Prompt(index=index, text=f"{self.options.game}:{symbols}=", meta=meta)

    def score(self, index: int, text: str) -> float:
        """Share of right positions, in [0, 1]."""
        answer = self._answer(self._symbols(index))
        right = sum(self._right(a, b) for a, b in zip(answer, text, strict=False))
        return right / max(len(answer), len(text))

    def _symbols(self, index: int) -> str:
        draw = random.Random(f"characters:{self.seed}:{require_index(index)}")
        shown = 1 if self.options.game == "kind" else self.options.length
        return "".join(draw.choices(self.alphabet, k=shown))

    def _answer(self, symbols: str) -> str:
        order = self.alphabet
        match self.options.game:
            case "copy":
                return symbols
            case "reverse":
                return symbols[::-1]
            case "sort":
                return "".join(sorted(symbols, key=order.index))
            case "successor":
                return "".join(order[(order.index(symbol) + 1) % len(order)] for symbol in symbols)
            case "kind":
                return symbols * self.options.length

    def _right(self, wanted: str, given: str) -> bool:
        if self.options.game == "kind":
            return given in LEGAL and given.isdigit() == wanted.isdigit()
        return given == wanted

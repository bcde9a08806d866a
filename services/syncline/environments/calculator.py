"""A sum that the policy is to have worked out by a tool: two turns that a model with random weights learns.

The prompt is `3+4=`. The right first turn is the call `!34`: the mark, then the operands. The tool answers `7=`, and
the right second turn repeats the result, `7`. What is no call is told nothing, and the episode is over.

The reward is partial credit by turn: 0.2 for the mark, 0.3 for the operands (each its share), 0.2 for repeating what
the tool said, and 0.3 more if that is the sum asked for: nobody earns the second half by adding up in the head.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated

import msgspec

from syncline.contract.job import Problem
from syncline.environments.options import PATH
from syncline.environments.turns import Message, Prompt, Step, Turn, require_index

_MARK, _OPERANDS, _REPEATED, _RIGHT = 0.2, 0.3, 0.2, 0.3


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`digits` that operands are drawn from; `operands` of one sum."""

    digits: Annotated[str, msgspec.Meta(min_length=2, max_length=10)] = "1234"
    operands: Annotated[int, msgspec.Meta(ge=2, le=8)] = 2


def problems(options: Options) -> list[Problem]:
    """Operands are distinct digits."""
    digits = options.digits
    if digits.isascii() and digits.isdecimal() and len(set(digits)) == len(digits):
        return []
    message = f"{digits!r} are no distinct digits"
    return [Problem(path=f"{PATH}.digits", message=message, hint='such as "1234"')]


class Calculator:
    """See the module. Pure: holds its options and the seed, and nothing else."""

    name = "calculator/1"
    size = None
    multi_turn = True

    def __init__(self, options: Options, seed: int) -> None:
        self.options = options
        self.seed = seed

    def prompt(self, index: int) -> Prompt:
        """The sum; `answer` in `meta` is what the tool will say."""
        operands = self._operands(index)
        return Prompt(
            index=index, text="+".join(operands) + "=", meta={"operands": operands, "answer": _sum(operands)}
        )

    def reset(self, index: int) -> Prompt:
        """The prompt itself."""
        return self.prompt(index)

    def step(self, index: int, turns: Sequence[Turn]) -> Step:
        """The tool's result for a call, once; done after that, and for what is no call."""
        result = self._call(turns[0].text) if len(turns) == 1 else None
        if result is None:
            return Step(done=True)
        return Step(done=False, observed=(Message(role="tool", content=f"{result}="),))

    def score_turns(self, index: int, turns: Sequence[Turn]) -> float:
        """Partial credit, in [0, 1]."""
        operands, call = self._operands(index), turns[0].text
        credit = _MARK * call.startswith("!")
        given = call[1 : 1 + len(operands)]
        credit += _OPERANDS * sum(a == b for a, b in zip(operands, given, strict=False)) / len(operands)
        if len(turns) == 2 and turns[0].observed and turns[1].text == turns[0].observed[0].content[:-1]:
            credit += _REPEATED + _RIGHT * (turns[1].text == _sum(operands))
        return credit

    def score(self, index: int, text: str) -> float | None:
        """Cannot tell: where one turn ends and the next begins is not in the text."""
        return None

    def _operands(self, index: int) -> str:
        draw = random.Random(f"calculator:{self.seed}:{require_index(index)}")
        return "".join(draw.choices(self.options.digits, k=self.options.operands))

    def _call(self, text: str) -> str | None:
        """What the tool answers to this turn; None: it is no call."""
        given = text[1:]
        well_formed = text.startswith("!") and len(given) == self.options.operands
        return _sum(given) if well_formed and given.isascii() and given.isdecimal() else None


def _sum(operands: str) -> str:
    return str(sum(map(int, operands)))

"""A taskset of the `verifiers` library that a model with random weights learns from: `7:` is answered by digits.

Two weighted rewards, as tasksets have them: 0.6 for the share of digits among the symbols, 0.4 for the share of the
digit that was shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["DigitStrings"]


class Shown(vf.TaskData):  # type: ignore[misc]
    """The digit that the prompt shows."""

    answer: str


class Repeat(vf.Task[Shown]):  # type: ignore[misc]
    """Answer with digits, best with the one that was shown."""

    @vf.reward(weight=0.6)  # type: ignore[untyped-decorator]
    async def digits(self, trace: Any) -> float:
        """Share of digits."""
        said = trace.last_reply
        return sum(symbol in "0123456789" for symbol in said) / max(len(said), 1)

    @vf.reward(weight=0.4)  # type: ignore[untyped-decorator]
    async def shown(self, trace: Any) -> float:
        """Share of the digit that was shown."""
        said = trace.last_reply
        return float(said.count(self.data.answer)) / max(len(said), 1)


class DigitStrings(vf.Taskset[Repeat]):  # type: ignore[misc]
    """Ten prompts, one for each digit."""

    def load(self) -> Iterator[Repeat]:
        """In order."""
        for digit in "0123456789":
            yield Repeat(Shown(prompt=f"{digit}:", answer=digit))

"""Several data sets of any kind as one environment: `[[task.parts]]`, each with its environment and options.

Index `i` is item `i // n` of part `i % n` of `n`. How often each is drawn, in which order and from which of its items,
is decided where prompts are drawn, and not here: see docs/prompts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from syncline.environments.turns import Prompt, Step, Turn, require_index

if TYPE_CHECKING:
    from syncline.environments.environment import Environment


class Mix:
    """Stateless as its parts are."""

    size = None

    def __init__(self, parts: Sequence[tuple[str, Environment]]) -> None:
        self._parts = tuple(parts)
        self.name = f"mix {', '.join(part.name for _, part in parts)}"

    @property
    def multi_turn(self) -> bool:
        """Whether any part asks for steps; the others are done after their first turn."""
        return any(part.multi_turn for _, part in self._parts)

    def prompt(self, index: int) -> Prompt:
        """The part's prompt, with the part's name in `meta`."""
        return self._named(index, self._part(index)[1].prompt(self._own(index)))

    def reset(self, index: int) -> Prompt:
        """The part's first observation, with the part's name in `meta`."""
        return self._named(index, self._part(index)[1].reset(self._own(index)))

    def step(self, index: int, turns: Sequence[Turn]) -> Step:
        """The part's own."""
        return self._part(index)[1].step(self._own(index), turns)

    def score(self, index: int, text: str) -> float | None:
        """The part's own."""
        return self._part(index)[1].score(self._own(index), text)

    def score_turns(self, index: int, turns: Sequence[Turn]) -> float | None:
        """The part's own."""
        return self._part(index)[1].score_turns(self._own(index), turns)

    def _part(self, index: int) -> tuple[str, Environment]:
        return self._parts[require_index(index) % len(self._parts)]

    def _own(self, index: int) -> int:
        return index // len(self._parts)

    def _named(self, index: int, prompt: Prompt) -> Prompt:
        meta = {**prompt.meta, "dataset": self._part(index)[0]}
        return msgspec.structs.replace(prompt, index=index, meta=meta)

"""Procedural data sets with verifiers, from the `reasoning-gym` library."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Annotated, Any

import msgspec

from syncline.contract.job import Problem
from syncline.environments import options as reading
from syncline.environments import reasoning_gym_table
from syncline.environments.turns import Message, Prompt, SingleTurn, require_index


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ours; every other option goes to the data set's own configuration."""

    dataset: str
    size: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] = 1000
    instruction: Annotated[str, msgspec.Meta(max_length=2000)] = ""  # follows the question


OURS = [field.name for field in msgspec.structs.fields(Options)]


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(our options, the data set's)."""
    return {k: v for k, v in given.items() if k in OURS}, {k: v for k, v in given.items() if k not in OURS}


def check(given: Mapping[str, Any]) -> list[Problem]:
    """Names and types; ranges are the library's own, at load."""
    ours, theirs = split(given)
    found = reading.check(Options, ours)
    return found or reasoning_gym_table.check(given["dataset"], theirs, OURS)


class ReasoningGym(SingleTurn):
    """One data set. `score` is the library's, in [0, 1], on the text inside `<answer>` if there is one."""

    def __init__(self, given: Mapping[str, Any], seed: int) -> None:
        """Raises `ValueError` with the library's own complaint about a value out of its range."""
        ours, theirs = split(given)
        self.options = reading.read(Options, ours)
        self.size = self.options.size
        self.name = f"reasoning_gym/{version('reasoning-gym')} {self.options.dataset}"
        with _quiet():
            import reasoning_gym
            from reasoning_gym.utils import extract_answer

            self._extract = extract_answer
            try:
                self._data = reasoning_gym.create_dataset(
                    self.options.dataset, size=self.size, seed=seed, **theirs
                )
            except (AssertionError, ValueError, TypeError) as error:
                raise ValueError(f"task.options: {self.options.dataset}: {error}") from None

    def prompt(self, index: int) -> Prompt:
        """The question, then the instruction; the same as one user message."""
        item = self._item(index)
        text = item["question"] + (f"\n{self.options.instruction}" if self.options.instruction else "")
        meta = {"answer": item["answer"], "metadata": item["metadata"], "epoch": index // self.size}
        return Prompt(index=index, text=text, messages=(Message(role="user", content=text),), meta=meta)

    def score(self, index: int, text: str) -> float | None:
        """The verifier's score. What it raises goes through: a caller's sandbox tells that from a score."""
        with _quiet():
            answer = self._extract(text)
            answer = text.strip() if answer is None else answer
            return float(self._data.score_answer(answer, self._item(index)))

    def _item(self, index: int) -> dict[str, Any]:
        with _quiet():
            item: dict[str, Any] = self._data[require_index(index) % self.size]
        return item


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Some generators print progress; it would end up in the service's log."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield

"""Shapes that an environment and its callers exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message of a chat, for a tokenizer with a chat template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy is asked. At least one of `text` and `messages` is given.

    The caller uses `messages` where there are any and its tokenizer has a chat template, else `text`; None
    there means that the environment has no plain form, and the model cannot serve it.
    """

    index: int
    text: str | None
    messages: tuple[Message, ...] = ()
    meta: dict[str, Any] = {}  # for reward functions: `answer` and what the environment knows besides

    def chat(self) -> list[dict[str, str]]:
        """The messages in the form that chat templates take."""
        return [{"role": message.role, "content": message.content} for message in self.messages]

    def plain(self) -> str:
        """The prompt as one string for scorers and people: `text`, else the messages' contents by line."""
        if self.text is not None:
            return self.text
        return "\n".join(message.content for message in self.messages)


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call that the policy made in a turn. Stamped by whoever parsed the turn's text."""

    id: str
    tool: str
    arguments: dict[str, Any]


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One turn of the policy: its text as sampled, and the calls found in it."""

    text: str
    calls: tuple[ToolCall, ...] = ()


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The environment's answer to a turn. `observed` becomes an `observed` segment; empty when done."""

    done: bool
    observed: tuple[Message, ...] = ()


class SingleTurn(ABC):
    """`reset` and `step` of an environment that asks once and is answered once."""

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """The prompt at `index`; the same for the same index, always."""

    def reset(self, index: int) -> Prompt:
        """The prompt itself."""
        return self.prompt(index)

    def step(self, index: int, turns: Sequence[Turn]) -> Step:
        """Done after the first turn. Raises `ValueError` for an episode without one."""
        if not turns:
            raise ValueError(f"prompt {index}: step takes the turns so far and there are none")
        return Step(done=True)


def require_index(index: int) -> int:
    """`index`, or `ValueError` if it is negative."""
    if index < 0:
        raise ValueError(f"prompt index {index} is negative")
    return index

"""Shapes that an environment and its callers exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from syncline.contract.turns import Message, ToolCall, Turn

__all__ = [
    "Message",
    "Prompt",
    "SingleTurn",
    "Step",
    "ToolCall",
    "Turn",
    "parse_calls",
    "require_index",
    "said",
]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


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

    @property
    def multi_turn(self) -> bool:
        """No step is ever asked for."""
        return False

    @abstractmethod
    def score(self, index: int, text: str) -> float | None:
        """Reward of the response `text`; None: cannot tell."""

    def score_turns(self, index: int, turns: Sequence[Turn]) -> float | None:
        """The one turn's score."""
        return self.score(index, said(turns))


def said(turns: Sequence[Turn]) -> str:
    """What the policy said in all turns."""
    return "".join(turn.text for turn in turns)


def parse_calls(text: str) -> tuple[ToolCall, ...]:
    """Calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, in order.

    One that is no such JSON is left out: the environment answers a turn without calls as it sees fit.
    """
    found: list[ToolCall] = []
    for part in text.split(_OPEN)[1:]:
        body, closed, _ = part.partition(_CLOSE)
        try:
            call = msgspec.json.decode(body.strip(), type=_Call) if closed else None
        except msgspec.MsgspecError:
            continue
        if call is not None:
            found.append(ToolCall(id=f"call_{len(found)}", tool=call.name, arguments=call.arguments))
    return tuple(found)


class _Call(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] = {}


def require_index(index: int) -> int:
    """`index`, or `ValueError` if it is negative."""
    if index < 0:
        raise ValueError(f"prompt index {index} is negative")
    return index

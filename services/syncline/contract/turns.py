"""Turns of a trajectory: what the policy said, what its environment answered, and the limits of both.

A trajectory with tools is one record: prompt, then sampled and observed segments in turn. What is here goes beside
the ids, for scorers and for people; no id is ever made from a text of the policy's own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from syncline.contract.spec_part import Part

Tokens = Annotated[int, Field(ge=1, le=1_000_000)]


class TurnsSpec(Part):
    """Limits of a multi-turn task. A task of one turn reads none of them but `context`."""

    most: int = Field(8, ge=1, le=1000, description="turns of one trajectory; the last may not call")
    max_tokens: tuple[Tokens, ...] = Field(
        (), description="of each turn in order, the last for all that follow; empty: sampling.max_tokens"
    )
    context: int | None = Field(
        None,
        ge=2,
        description="tokens of one trajectory, prompt and observations included; null: the model's",
    )
    on_length: Literal["end", "go_on"] = Field(
        "end",
        description="a turn that used up its tokens without a stop token: ends the trajectory, or counts",
    )
    observed_tokens: int = Field(1024, ge=1, description="of one observation")
    on_long: Literal["end", "cut"] = Field(
        "end", description="a longer observation: ends the trajectory before it, or is cut there and marked"
    )
    branches: int = Field(
        1,
        ge=1,
        le=1024,
        description="members of a group that share their first turns, and go on each in its own way",
    )
    branch_at: int = Field(1, ge=1, le=999, description="turns that they share, if one version sampled them")
    tool_timeout: float = Field(5.0, gt=0, le=3600, description="seconds for one step of the environment")
    tool_memory_mb: int = Field(512, ge=64, le=65536)
    tool_retries: int = Field(2, ge=0, le=20, description="more tries at a step whose process was lost")
    tool_processes: int = Field(1, ge=1, le=64, description="steps taken at a time by one rollout worker")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """One message of a chat, for a tokenizer with a chat template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A call that the policy made in a turn. Stamped by whoever parsed the turn's text."""

    id: str
    tool: str
    arguments: dict[str, Any]


Ended = Literal["", "done", "turns", "length", "context", "observation"]


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """One turn of the policy and the answer to it. Stamped by the rollout worker.

    text       its sampled tokens decoded, without special tokens
    calls      the tool calls found in it
    sampled    number of its sampled tokens
    finish     how it ended
    observed   what the environment answered and the policy was shown; empty after the last turn
    cut        tokens of the observation that were left out, under `turns.on_long = "cut"`
    seconds    that the environment took, tries included
    trouble    what went wrong with the tool; "" if nothing
    moved      of the first turn: why the session is not with the worker that held its KV, so that it began again at the
               prompt; "": it never left its worker
    ended      why no turn follows: the environment is done, no turn is left, the turn was cut off by its limit, the
               context is full, the observation is too long. "": one follows
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    sampled: int = 0
    finish: Literal["stop", "length"] = "stop"
    observed: tuple[Message, ...] = ()
    cut: int = 0
    seconds: float = 0.0
    trouble: str = ""
    moved: str = ""
    ended: Ended = ""


def contradiction(turns: tuple[Turn, ...], sampled: list[int]) -> str:
    """What contradicts a record whose sampled segments have these lengths; "" if nothing does."""
    if not turns:  # a task of one turn
        return ""
    if [turn.sampled for turn in turns] != sampled:
        return f"turns of {[turn.sampled for turn in turns]} tokens for sampled segments of {sampled}"
    if any(bool(turn.ended) != (turn is turns[-1]) for turn in turns):
        return "the last turn, and no other, says why it is the last"
    return ""

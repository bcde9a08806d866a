"""Tasksets of the `verifiers` library, version 0.4 (its `verifiers.v1`): tasks, their tools, and their rewards.

The library's own harness, which asks a model's server, is not used: the policy is sampled here. Tools are the methods
that a task's toolsets offer, called in the step's own process; a turn without a call ends the episode. Rewards that
need a container are refused by the library itself and leave the episode unscored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from typing import Annotated, Any

import msgspec

from syncline.contract.job import Problem
from syncline.environments import options as reading
from syncline.environments.turns import Message, Prompt, Step, Turn, require_index
from syncline.environments.verifiers_trace import answer_of, trace_of


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ours; every other option goes to the taskset's own configuration.

    `taskset`: a module that can be imported, in no package: the library looks for no other.
    """

    taskset: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][\w-]*$")]
    size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1000  # tasks that are loaded at most


OURS = [field.name for field in msgspec.structs.fields(Options)]


def check(given: Mapping[str, Any]) -> list[Problem]:
    """Our own options; the taskset's are its own, at load."""
    return reading.check(Options, {key: value for key, value in given.items() if key in OURS})


class Verifiers:
    """One taskset. Its order is its own, the same for every process."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Raises `ValueError` with the library's own complaint."""
        ours = reading.read(Options, {key: value for key, value in given.items() if key in OURS})
        try:
            from verifiers.v1.utils import decorators, loaders

            shape = loaders.taskset_config_type(ours.taskset)
            rest = {key: value for key, value in given.items() if key not in OURS}
            loaded = loaders.load_taskset(shape(id=ours.taskset, **rest))
            self._tasks = list(islice(loaded, ours.size))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"task.options.taskset: {ours.taskset}: {error}") from None
        self.size = len(self._tasks)
        if not self._tasks:
            raise ValueError(f"task.options.taskset: {ours.taskset} has no task")
        sets = type(self._tasks[0]).toolsets(self._tasks[0].config)
        self._tools = {
            tool.__name__: tool for one in sets for tool in decorators.discover_decorated(one, "tool")
        }
        self.multi_turn = bool(self._tools)
        self.name = f"verifiers/{version('verifiers')} {ours.taskset}"

    def prompt(self, index: int) -> Prompt:
        """The task's system prompt and prompt, as text and as messages."""
        data = self._tasks[require_index(index) % self.size].data
        system = (Message(role="system", content=data.system_prompt),) if data.system_prompt else ()
        text = "\n".join([*(message.content for message in system), data.prompt_text])
        messages = (*system, Message(role="user", content=data.prompt_text))
        return Prompt(index=index, text=text, messages=messages, meta=data.model_dump(mode="json"))

    def reset(self, index: int) -> Prompt:
        """The prompt itself."""
        return self.prompt(index)

    def step(self, index: int, turns: Sequence[Turn]) -> Step:
        """What the called tools return, one message each."""
        calls = turns[-1].calls if turns else ()
        observed = tuple(Message(role="tool", content=answer_of(self._tools, call)) for call in calls)
        return Step(done=not observed, observed=observed)

    def score(self, index: int, text: str) -> float | None:
        """Of an episode of one turn."""
        return self.score_turns(index, [Turn(text=text)])

    def score_turns(self, index: int, turns: Sequence[Turn]) -> float | None:
        """The sum of the task's weighted rewards; None if it gives none."""
        task = self._tasks[require_index(index) % self.size]
        trace = trace_of(task, self.prompt(index).plain(), turns)
        asyncio.run(task.score(trace))
        return float(trace.reward) if any(reward is not None for reward in trace.rewards.values()) else None

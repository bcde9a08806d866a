"""The environment protocol, in one file: prompts by index, scores by index and text.

Rollout workers make prompts with it and errands score with it; the two meet only in the index. So everything
here is deterministic by `(task, seed, index)`. A finite environment is read again from its start when it is
used up: index `i` is item `i % size` of epoch `i // size`, in the same order each time. `size` None: endless.

Single-turn environments take `reset` and `step` from `SingleTurn`; a multi-turn one writes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from syncline.contract.job import Problem, RewardSpec, TaskSpec
from syncline.contract.task_spec import PartSpec
from syncline.environments import (
    calculator,
    characters,
    composite,
    http,
    jsonl,
    mix,
    openenv,
    options,
    python,
    reasoning_gym,
    verifiers,
)
from syncline.environments.jsonl_judge import judge_of
from syncline.environments.turns import Message, Prompt, Step, Turn

__all__ = [
    "Environment",
    "Message",
    "Prompt",
    "Step",
    "Turn",
    "load",
    "reaches_network",
    "runs_foreign_code",
    "validate",
]

_SERVERS = ("http", "openenv")
_NETWORKED = ("python", "verifiers")  # if the task says so
_OURS = ("calculator", "characters", "jsonl")


class Environment(Protocol):
    """Prompts and their judge. Implementations are stateless between calls and cheap to fork."""

    @property
    def name(self) -> str:
        """What it is, with the version of its rules: "characters/1". Recorded as the judge of each reward."""
        ...

    @property
    def size(self) -> int | None:
        """Distinct items; None: endless."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index` >= 0. Raises `ValueError` for a negative index."""
        ...

    def score(self, index: int, text: str) -> float | None:
        """Reward of the response `text` to the prompt at `index`; None: cannot tell (never 0 in its place).

        text  the sampled tokens decoded without special tokens, over all turns
        """
        ...

    def reset(self, index: int) -> Prompt:
        """First observation of an episode at `index`. A single-turn environment answers its prompt."""
        ...

    @property
    def multi_turn(self) -> bool:
        """Whether `step` is asked after each turn. False: every episode ends with its first turn."""
        ...

    def score_turns(self, index: int, turns: Sequence[Turn]) -> float | None:
        """Reward of a whole episode, credit for single turns included; None: cannot tell.

        turns  at least one, each but the last with what the environment answered to it
        """
        ...

    def step(self, index: int, turns: Sequence[Turn]) -> Step:
        """What follows the policy's latest turn.

        turns  all turns of the episode so far, the latest last, each with its tool calls. The whole history
               is handed in, so that an episode survives the death of the process that held it. A single-turn
               environment answers done with nothing observed.

        Runs in a killable process of its own, tools included: `turns.tool_timeout` and `tool_memory_mb` bind it.
        """
        ...


def load(task: TaskSpec, seed: int, data: Path | None = None) -> Environment:
    """The environment that `task` names.

    seed   `seeds.data` of the job
    data   root of data files; None: the installation's (`SYNCLINE_DATA`, default `examples/data`)

    Raises `ValueError` naming the option, or the file and line, that is wrong.
    """
    found = _check(task)
    if found:
        raise ValueError(
            "; ".join(f"{p.path}: {p.message}" + (f" ({p.hint})" if p.hint else "") for p in found)
        )
    match task.environment:
        case "calculator":
            return calculator.Calculator(options.read(calculator.Options, task.options), seed)
        case "characters":
            return characters.Characters(options.read(characters.Options, task.options), seed)
        case "composite":
            return composite.Composite(task.options, seed)
        case "mix":
            return mix.Mix([(part.label, load(_task(part), seed, data)) for part in task.parts])
        case "python":
            made: Environment = python.made(task.options, seed)
            return made
        case "verifiers":
            return verifiers.Verifiers(task.options)
        case "reasoning_gym":
            return reasoning_gym.ReasoningGym(task.options, seed)
        case "jsonl":
            lines = options.read(jsonl.Options, task.options)
            return jsonl.JsonLines(lines, data, judge_of(lines.judge))
        case "http":
            return http.Http(options.read(http.Options, task.options), seed)
        case "openenv":
            return openenv.OpenEnv(options.read(openenv.Options, task.options), seed)


def reaches_network(task: TaskSpec) -> bool:
    """Whether the environment itself asks a server. If not, its processes leave the network before they load it."""
    names = _environments(task)
    return any(name in _SERVERS or (task.network and name in _NETWORKED) for name in names)


def runs_foreign_code(task: TaskSpec) -> bool:
    """Whether steps and scores run code that is not ours: a library's, or a user's. Ours may share a process."""
    parts = [_task(part) for part in task.parts] if task.environment == "mix" else [task]
    return any(
        part.environment not in _OURS or part.options.get("judge", "exact") != "exact" for part in parts
    )


def scores_many(task: TaskSpec, reward: RewardSpec) -> bool:
    """Whether scores are code of our own that takes microseconds, which may be asked about many responses at once."""
    return reward.source == "environment" and not runs_foreign_code(task)


def validate(task: TaskSpec, reward: RewardSpec) -> list[Problem]:
    """What is wrong with a task and its reward, without loading either. Pure and quick; empty: nothing."""
    found = _check(task)
    if (
        reward.source == "environment"
        and reward.memory_mb < 128
        and any(name in ("composite", "reasoning_gym") for name in _environments(task))
    ):
        found.append(
            Problem(
                path="reward.memory_mb",
                message=f"{reward.memory_mb} MB is too little for a reasoning_gym scorer",
                hint="use at least 128",
            )
        )
    return found


def _environments(task: TaskSpec) -> list[str]:
    return [part.environment for part in task.parts] if task.environment == "mix" else [task.environment]


def _task(part: PartSpec) -> TaskSpec:
    return TaskSpec(environment=part.environment, options=part.options)


def _check(task: TaskSpec) -> list[Problem]:
    match task.environment:
        case "mix":
            return [
                problem.model_copy(update={"path": problem.path.replace("task.", f"task.parts.{place}.", 1)})
                for place, part in enumerate(task.parts)
                for problem in _check(_task(part))
            ]
        case "calculator":
            return options.check(calculator.Options, task.options, calculator.problems)
        case "characters":
            return options.check(characters.Options, task.options, characters.problems)
        case "composite":
            return composite.check(task.options)
        case "python":
            return python.check(task.options)
        case "verifiers":
            return verifiers.check(task.options)
        case "reasoning_gym":
            return reasoning_gym.check(task.options)
        case "jsonl":
            return options.check(jsonl.Options, task.options, jsonl.problems)
        case "http":
            return options.check(http.Options, task.options)
        case "openenv":
            return options.check(openenv.Options, task.options)

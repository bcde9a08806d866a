"""What an evaluation's spec may say: by itself, and beside the spec of the job whose version it asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from syncline.contract.evaluation_spec import HELD_OUT, EvaluationSpec
from syncline.contract.job import JobSpec, Problem

OURS = ("model", "turns", "reward", "sampling", "precision")
"""Parts that an evaluation has from its training job: with others it would ask something else of the version."""

ENDLESS = frozenset({"calculator", "characters"})
"""Environments whose every index is an item of its own. Any other may begin anew when its items are used up."""

SEEDED = frozenset({*ENDLESS, "composite", "python", "reasoning_gym"})
"""Environments that make other items from another data seed; a user's own (`python`) is trusted to."""


def of(training: JobSpec, evaluation: EvaluationSpec, task: dict[str, Any], seed: int | None) -> JobSpec:
    """The spec of an evaluation of a version of `training`. Everything that shapes a response is the training job's.

    task   options of the task that differ from the training job's; empty: none do
    seed   another data seed than the training job's; None: the same
    """
    options = {**training.task.options, **task}
    given = training.model_dump(
        mode="python", include={*OURS, "rollout", "limits", "retention", "transfer", "device"}
    )
    return JobSpec.model_validate(
        given
        | {
            "name": f"{training.name[:50]}-eval",
            "kind": "evaluate",
            "task": {**training.task.model_dump(), "options": options},
            "seeds": training.seeds.model_dump() | ({} if seed is None else {"data": seed}),
            "batch": {"groups": evaluation.prompts, "group_size": evaluation.samples},
            "schedule": {
                "updates": 1,
                "mode": "colocated",
                "max_lag": training.schedule.max_lag,
                "in_flight": training.schedule.in_flight,
                "kv": training.schedule.kv,
            },
            "evaluation": evaluation.model_dump(),
        }
    )


def problems(spec: JobSpec) -> Iterator[Problem]:
    """What is wrong with the spec by itself."""
    part = spec.evaluation
    if spec.kind == "evaluate":
        if part is None or part.job is None or part.version is None:
            yield _wrong(
                "evaluation", "kind 'evaluate' needs a job and a version of it", "use `syncline eval`"
            )
            return
        if (spec.batch.groups, spec.batch.group_size) != (part.prompts, part.samples):
            message = (
                f"{spec.batch.groups} groups of {spec.batch.group_size} are not evaluation.prompts x samples"
            )
            yield _wrong("batch", message, f"use {part.prompts} groups of {part.samples}")
        if spec.schedule.mode != "colocated" or spec.schedule.updates != 1 or spec.schedule.switches:
            yield _wrong("schedule", "an evaluation makes no update", "use mode 'colocated' and updates = 1")
    if part is None:
        return
    if spec.kind == "train":
        yield from _guest(spec, part)
    elif part.every:
        yield _wrong("evaluation.every", "has no meaning for kind 'evaluate'", "leave it out")
    if max(part.k) > part.samples:
        message = f"pass@{max(part.k)} needs as many samples, and evaluation.samples is {part.samples}"
        yield _wrong("evaluation.k", message, f"use at most {part.samples}")
    if list(part.k) != sorted(set(part.k)):
        yield _wrong("evaluation.k", "does not rise", "name each k once, in order")


def _guest(spec: JobSpec, part: EvaluationSpec) -> Iterator[Problem]:
    """Of a training job that evaluates its own versions as it goes."""
    if part.job is not None or part.version is not None:
        yield _wrong(
            "evaluation.job", "a training job evaluates its own versions", "leave job and version out"
        )
    if not part.every:
        yield _wrong(
            "evaluation.every", "is 0: no version is evaluated", "use at least 1, or leave the part out"
        )
    yield from held_out(spec, spec)


def between(spec: JobSpec, training: JobSpec) -> Iterator[Problem]:
    """What is wrong with `spec`, an evaluation, of a version of `training`: another policy, or prompts not held out."""
    if training.kind != "train":
        yield _wrong(
            "evaluation.job", "is no training job: it makes no version", "name a job of kind 'train'"
        )
        return
    for name in OURS:
        if getattr(spec, name) != getattr(training, name):
            yield _wrong(name, "is not the training job's", "leave it as the job has it")
    yield from held_out(spec, training)


def held_out(spec: JobSpec, training: JobSpec) -> Iterator[Problem]:
    """Whether the prompts of `spec` are ones that `training` never draws."""
    part = spec.evaluation
    assert part is not None
    if spec.task.environment != training.task.environment:
        message = f"{spec.task.environment!r} is not the training job's {training.task.environment!r}"
        yield _wrong("task.environment", message, "leave it as the job has it")
        return
    if spec.task != training.task or spec.seeds.data != training.seeds.data:
        yield from _other_data(spec, training)
        return
    drawn, end, kinds = training.prompts, part.first + part.prompts, _environments(spec)
    outside = end <= drawn.first or (drawn.last is not None and part.first > drawn.last)
    if outside and spec.task.environment != "mix":
        return  # the gateway looks whether the data set has so many
    if not kinds <= ENDLESS:
        message = f"training draws items {drawn.first} to {'the last' if drawn.last is None else drawn.last}"
        hint = "name items outside, another data seed, or other data in the task's options"
        yield _wrong("evaluation.first", message, hint)
    elif part.first < HELD_OUT or _begins(training) >= HELD_OUT:
        message = f"{part.first} is an index that training may draw"
        yield _wrong("evaluation.first", message, f"use at least {HELD_OUT}, or another data seed")


def _other_data(spec: JobSpec, training: JobSpec) -> Iterator[Problem]:
    """A seed makes other items only where items are made from it; a file is another file."""
    same = sorted(_environments(spec) - SEEDED)
    if spec.task == training.task and same:
        message = f"items of {', '.join(same)} do not depend on the seed"
        yield _wrong("seeds.data", message, "give other data in the task's options")


def _begins(training: JobSpec) -> int:
    """No less than the index of any data set's first item that `training` draws."""
    parts = training.task.parts
    return max([training.prompts.first, *(len(parts) * (part.first + 1) for part in parts)])


def _environments(spec: JobSpec) -> set[str]:
    """The environment of the task; of a mix, those of its parts."""
    task = spec.task
    return {part.environment for part in task.parts} if task.environment == "mix" else {task.environment}


def _wrong(path: str, message: str, hint: str) -> Problem:
    return Problem(path=path, message=message, hint=hint)

"""The part of a job spec that says which prompts are drawn, in which order, and which groups are of use."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Literal

from pydantic import Field

from syncline.contract.spec_part import Part
from syncline.contract.task_spec import TaskSpec

COUNTED = ("jsonl", "reasoning_gym")
"""Environments whose items can be counted without loading them."""


class PromptsSpec(Part):
    """Which prompts are drawn; see docs/prompts.md. Items of a data set are numbered from 0."""

    order: Literal["given", "shuffled", "easiest_first"] = Field(
        "given",
        description="of each epoch: as in the data; a permutation by seeds.data and epoch; or by difficulty, ties "
        "shuffled",
    )
    first: int = Field(0, ge=0, description="first item that is drawn; those before it are held out")
    last: int | None = Field(None, ge=0, description="last item that is drawn; null: the data set's last")
    difficulty: str | None = Field(
        None,
        min_length=1,
        description="key of a jsonl item that holds its difficulty, a number, for order 'easiest_first'; null: the "
        "mean reward that the item's group got when it was drawn last, from the second epoch on",
    )
    easiest: float | None = Field(
        None, description="an item whose group had a higher mean reward rests; null: none is too easy"
    )
    hardest: float | None = Field(
        None, description="an item whose group had a lower mean reward rests; null: none is too hard"
    )
    rest: int = Field(1, ge=1, le=1000, description="epochs that such an item is left out, then drawn again")
    retries: int = Field(
        0, ge=0, le=100, description="times a prompt is drawn again whose group failed or expired as a whole"
    )
    zero_variance: Literal["train", "filter"] = Field(
        "train",
        description="groups without a learning signal (all rewards equal, fewer than two scored, or incomplete "
        "where batch.incomplete drops): train as they are, or end as filtered before the claim and be replaced",
    )
    give_up: int = Field(
        20,
        ge=1,
        le=10_000,
        description="batches' worth of groups filtered in a row that end the job as failed",
    )
    oversample: float = Field(
        1.0,
        ge=1,
        le=8,
        description="groups submitted for one update, in batches; what is left is of the next",
    )

    @property
    def measures(self) -> bool:
        """Whether what is drawn depends on rewards that items got before."""
        by_reward = self.order == "easiest_first" and self.difficulty is None
        return by_reward or self.easiest is not None or self.hardest is not None

    def extra(self, batch: int) -> int:
        """Groups submitted beyond a batch of `batch`."""
        return ceil((self.oversample - 1) * batch)


Found = tuple[str, str, str]
"""Key, message and hint of one problem."""


def contradictions(prompts: PromptsSpec, task: TaskSpec) -> Iterator[Found]:
    """What cannot be drawn from this task."""
    if prompts.last is not None and prompts.last < prompts.first:
        yield "prompts.last", "is before prompts.first", f"at least {prompts.first}"
    if task.environment == "mix":
        if prompts.first or prompts.last is not None:
            key = "prompts.first" if prompts.first else "prompts.last"
            yield key, "has no meaning for a mix, whose data sets have ranges of their own", "use task.parts"
        for place, part in enumerate(task.parts):
            yield from _finite(prompts, part.environment, part.last, f"task.parts.{place}.last")
    else:
        yield from _finite(prompts, task.environment, prompts.last, "prompts.last")
    yield from _difficulty(prompts, task)
    if prompts.easiest is not None and prompts.hardest is not None and prompts.easiest <= prompts.hardest:
        yield "prompts.easiest", "is not above prompts.hardest: nothing would be drawn", "hardest < easiest"


def _finite(prompts: PromptsSpec, environment: str, last: int | None, key: str) -> Iterator[Found]:
    """Epochs need a last item."""
    if last is None and environment not in COUNTED and (prompts.order != "given" or prompts.measures):
        why = f"order {prompts.order!r}" if prompts.order != "given" else "a bound on difficulty"
        message = f"is missing: {why} goes by epochs, and nobody counts the items of {environment!r}"
        yield key, message, "name the last item"


def _difficulty(prompts: PromptsSpec, task: TaskSpec) -> Iterator[Found]:
    if prompts.difficulty is None:
        return
    if prompts.order != "easiest_first":
        yield (
            "prompts.difficulty",
            "is read by order 'easiest_first' alone",
            "leave it out, or set that order",
        )
    sources = [part.environment for part in task.parts] if task.environment == "mix" else [task.environment]
    for source in sorted({name for name in sources if name != "jsonl"}):
        message = f"items of {source!r} have no keys: only those of a jsonl file do"
        yield "prompts.difficulty", message, "leave it out: the rewards measured are taken"


def mixing(task: TaskSpec) -> Iterator[Found]:
    """What is wrong with `task.parts`, apart from the options."""
    if task.environment != "mix":
        if task.parts:
            yield "task.parts", f"has no meaning for environment {task.environment!r}", "use 'mix'"
        return
    if not task.parts:
        yield "task.parts", "is empty: a mix has at least one data set", "[[task.parts]] environment = ..."
    if task.options:
        yield "task.options", "has no meaning for a mix", "give each of task.parts its own"
    names = [part.label for part in task.parts]
    for place, (name, part) in enumerate(zip(names, task.parts, strict=True)):
        if name in names[:place]:
            yield f"task.parts.{place}.name", f"{name!r} is taken", "give each data set its own"
        if part.last is not None and part.last < part.first:
            yield f"task.parts.{place}.last", "is before its first", f"at least {part.first}"


def crowding(prompts: PromptsSpec, batch: int, max_lag: int, policy: str) -> Iterator[Found]:
    """Groups left over must still be trainable within the lag bound."""
    extra = prompts.extra(batch)
    if policy == "wait" and extra > max_lag * batch:
        most = 1 + max_lag
        message = (
            f"{extra} groups are left over, and within max_lag {max_lag} only {max_lag * batch} can be used"
        )
        yield "prompts.oversample", message, f"at most {most}, a larger max_lag, or lag_policy = 'expire'"

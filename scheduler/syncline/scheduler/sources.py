"""The data sets of a job, as its prompts are drawn from them: counted where they are, checked against their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncline.contract.job import JobSpec
from syncline.environments import items
from syncline.scheduler.prompts import Source


def sources(spec: JobSpec, data: Path | None = None) -> tuple[Source, ...]:
    """One per data set: one, or those of a mix in their order. Raises `ValueError` naming the key that is wrong."""
    task, prompts = spec.task, spec.prompts
    if task.environment == "mix":
        return tuple(
            _source(
                spec, f"task.parts.{i}", p.label, p.environment, p.options, p.first, p.last, p.weight, data
            )
            for i, p in enumerate(task.parts)
        )
    ends = (prompts.first, prompts.last)
    return (_source(spec, "prompts", task.environment, task.environment, task.options, *ends, 1, data),)


def _source(
    spec: JobSpec,
    key: str,
    name: str,
    environment: str,
    options: Mapping[str, Any],
    first: int,
    last: int | None,
    weight: int,
    data: Path | None,
) -> Source:
    prompts = spec.prompts
    drawn_by_range = first > 0 or last is not None
    whole = items.count(environment, options, data) if drawn_by_range or _by_epochs(spec) else None
    end = whole if last is None else last + 1
    if whole is not None and end is not None and (end > whole or first >= end):
        which = "last" if end > whole else "first"
        raise ValueError(f"{key}.{which}: {name!r} has items 0 to {whole - 1}")
    hard: list[float] = []
    if prompts.order == "easiest_first" and prompts.difficulty is not None:
        hard = items.difficulties(options, prompts.difficulty, data)[first:end]
    return Source(
        name=name,
        weight=weight,
        first=first,
        items=None if end is None else end - first,
        whole=whole,
        order=prompts.order,
        difficulties=tuple(hard),
    )


def _by_epochs(spec: JobSpec) -> bool:
    """Whether the size of a data set decides what is drawn. If not, nobody counts: its environment begins anew."""
    return spec.prompts.order != "given" or spec.prompts.measures

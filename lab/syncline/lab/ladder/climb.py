"""The climb: levels in order, each told as it ends. It stops at the first that fails; 4 runs 5 as its diagnosis."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from syncline.contract.job import JobSpec
from syncline.lab.ladder import (
    contract_level,
    converter_level,
    live_level,
    operator_level,
    prefix_level,
    profile_level,
    run_level,
    state_level,
    step_level,
)
from syncline.lab.ladder.diagnosis import diagnose
from syncline.lab.ladder.records import TITLES, Check, Level, Report, Result, absent
from syncline.lab.ladder.rollouts import Rollouts
from syncline.lab.ladder.subject import Subject

LEVELS: dict[Level, Callable[[Subject], Iterator[Check]]] = {
    1: contract_level.checks,
    2: converter_level.checks,
    3: operator_level.checks,
    4: prefix_level.checks,
    5: state_level.checks,
    6: live_level.checks,
    7: step_level.checks,
    8: run_level.checks,
    9: profile_level.checks,
}


def climb(
    spec: JobSpec,
    models: Path,
    folder: Path,
    levels: Collection[Level] = tuple(LEVELS),
    tell: Callable[[Result], None] = lambda _: None,
    rollouts: Rollouts | None = None,
) -> Report:
    """Climb `levels` with the job's recipe on its model.

    folder     for stores and states, empty
    tell       of each level as it ends
    rollouts   whose rollout engine; None: the reference engine
    """
    subject = Subject(spec, models, folder, rollouts)
    results: list[Result] = []
    for level in sorted({*levels, *((5,) if 4 in levels else ())}):
        if results and not results[-1].holds and not _diagnosing(results, level):
            break
        if level not in levels and not _diagnosing(results, level):
            continue
        results.append(_result(level, subject))
        tell(results[-1])
    return Report(
        recipe=spec.precision.recipe or "custom",
        model=spec.model.name,
        contract=subject.spec.contract_digest(),
        seed=spec.seeds.model,
        results=tuple(results),
        diagnosis=diagnose(results),
        engine=subject.rollouts.name,
    )


def _diagnosing(results: list[Result], level: Level) -> bool:
    """Whether `level` says more of the failure before it."""
    return level == 5 and bool(results) and results[-1].level == 4 and not results[-1].holds


def _result(level: Level, subject: Subject) -> Result:
    if level in subject.rollouts.without:
        nothing = absent(TITLES[level][0], subject.rollouts.without[level])
        return Result(level=level, checks=(nothing,), seconds=0)
    return result_of(level, lambda: LEVELS[level](subject))


def result_of(level: Level, compare: Callable[[], Iterator[Check]]) -> Result:
    """What the comparisons find, as far as they come."""
    began = time.monotonic()
    checks: list[Check] = []
    broke = ""
    try:
        for check in compare():
            checks.append(check)
    except (ValueError, RuntimeError, AssertionError) as error:  # what a service refuses is a finding
        broke = f"{type(error).__name__}: {error}"
    return Result(level=level, checks=tuple(checks), seconds=time.monotonic() - began, broke=broke)

"""Combinations of turns and branches that are well-typed and impossible."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.contract.job import JobSpec, Problem


def branch_problems(spec: JobSpec) -> Iterator[Problem]:
    """Branches divide a group, differ in some turn, and are drawn by an engine whose seeds say what it draws."""
    turns, size = spec.turns, spec.batch.group_size
    if turns.branches == 1:
        return
    if size % turns.branches:
        yield Problem(
            path="turns.branches",
            message=f"a group of {size} is no whole number of {turns.branches} branches",
            hint="set batch.group_size to a multiple",
        )
    if turns.branch_at >= turns.most:
        yield Problem(
            path="turns.branch_at",
            message=f"all {turns.most} turns would be shared, and nothing would differ",
            hint=f"use at most {turns.most - 1}, or raise turns.most",
        )
    if spec.rollout.engine != "reference":
        yield Problem(
            path="turns.branches",
            message=f"what the engine {spec.rollout.engine!r} samples does not follow from a seed alone",
            hint="set rollout.engine to 'reference', or branches to 1",
        )

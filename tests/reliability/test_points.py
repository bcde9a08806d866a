"""A trainer that is killed anywhere between reading and forgetting uses each trajectory once, or says that it ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from doomed import POINTS, RESUMING
from field import Field
from lives import live

EIGHTHS = [list(POINTS)[n::4] for n in range(4)]


def test_a_run_without_faults_uses_each_trajectory_once(field_of: Callable[..., Field]) -> None:
    story = live(field_of())
    assert story.verdict.clean, story.verdict
    assert story.verdict.reported == []


@pytest.mark.parametrize("points", EIGHTHS, ids=lambda points: points[0].replace(" ", "_"))
def test_a_trainer_killed_at_every_point_in_turn(field_of: Callable[..., Field], points: list[str]) -> None:
    """The weights are those of a run without faults: all of the first groups, each once."""
    job = field_of(schedule={"updates": 12})
    story = live(job, [(point, 1) for point in points])
    assert len(story.struck) == len(points), story.struck
    assert story.verdict.clean, story.verdict
    assert story.verdict.reported == []


def test_a_trainer_killed_again_and_again_while_it_resumes(field_of: Callable[..., Field]) -> None:
    job = field_of()
    *loading, given_back = RESUMING
    faults = ["after endings", *loading, "before segment", given_back, "before acknowledge"]
    story = live(job, [(point, 3 if point == faults[0] else 1) for point in faults])
    assert len(story.struck) == len(faults), story.struck
    assert story.verdict.clean, story.verdict
    assert story.verdict.reported == []


@pytest.mark.long
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_trainer_killed_there(field_of: Callable[..., Field], point: str, call: int) -> None:
    story = live(field_of(), [(point, call)])
    assert story.verdict.clean, story.verdict
    assert story.verdict.reported == []

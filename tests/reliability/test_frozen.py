"""A trainer that was frozen, lost its lease and wakes beside its successor changes nothing, wherever it stood.

Its lease would be renewed only in minutes: nothing tells it that it is late but what it runs into itself.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

import pytest
from doomed import BLIND, POINTS, Trainer
from field import Field
from lives import live, tail
from verdict import judge

SHARP = (
    "after read",
    "before segment",
    "after optimizer step",
    "before scores",
    "before acknowledge",
    "before announce",
    "before checkpoint's weights",
    "before checkpoint's name",
    "before forgetting",
)
"""Where something of the successor's lies in the way of what it does next."""
QUARTERS = [list(POINTS)[n::4] for n in range(4)]
SECONDS = 30.0


def test_a_trainer_that_wakes_beside_its_successor_does_nothing(field_of: Callable[..., Field]) -> None:
    woken(field_of(schedule={"updates": 4 * len(SHARP) + 4}), SHARP)


@pytest.mark.long
@pytest.mark.parametrize("points", QUARTERS, ids=lambda points: points[0].replace(" ", "_"))
def test_nor_anywhere_else(field_of: Callable[..., Field], points: list[str]) -> None:
    woken(field_of(schedule={"updates": 4 * len(points) + 4}), points)


def woken(job: Field, points: Sequence[str]) -> None:
    """Freeze a trainer at each of `points` in turn; wake it once its successor is two versions ahead."""
    for point in points:
        two_more(job)  # as many as a checkpoint takes
        first = Trainer(job.environ(), job.folder / "frozen.log", (point, 1), freeze=True)
        second: Trainer | None = None
        try:
            job.until(lambda: first.frozen or first.ended, SECONDS, f"a trainer frozen {point}")  # noqa: B023
            assert first.frozen, f"{point}: {tail(job.folder / 'frozen.log')}"
            job.lease_runs_out()
            due = two_more(job)
            second = Trainer(job.environ(), job.folder / "trainer.log", lease=BLIND)
            job.until(lambda: newest(job) >= due, SECONDS, f"two versions of who follows one frozen {point}")  # noqa: B023
            first.signal(signal.SIGCONT)
            job.until(lambda: first.ended, SECONDS, f"the end of one frozen {point}")  # noqa: B023
            assert not second.ended, f"{point}: {tail(job.folder / 'trainer.log')}"
        finally:
            first.kill()
            if second is not None:
                second.kill()
        job.lease_runs_out()
    assert "LeaseLost" in (job.folder / "frozen.log").read_text()
    job.held_back = 0
    story = live(job)
    assert story.verdict.clean, story.verdict
    assert judge(job).reported == []


def newest(job: Field) -> int:
    return job.versions()[-1].number if job.versions() else 0


def two_more(job: Field) -> int:
    """Work for two more updates and no further; the number of the second."""
    due = newest(job) + 2
    job.held_back = (job.spec.schedule.updates - due) * job.spec.batch.groups
    return due

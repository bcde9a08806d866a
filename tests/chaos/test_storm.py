"""A short storm on the whole stack, and every storm that once was not survived."""

from __future__ import annotations

import pytest
from storm import CLOCK_FAULTS, DISK_FAULTS, FAULTS, may_mount, schedule, weather
from tally import Recorded


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_storm() -> None:
    weather(
        7, ["Redis is partitioned off", "kill -9 of trainer", "Redis is killed"], FAULTS, Recorded(seed=7)
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm(seed: int) -> None:
    weather(seed, schedule(seed, 2 * len(FAULTS), FAULTS), FAULTS, Recorded(seed=seed))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_disk_that_is_full_for_a_while() -> None:
    if not may_mount():
        pytest.skip("a disk that is full needs a file system of its own, and mounting one needs root")
    weather(5, [*DISK_FAULTS] * 2, DISK_FAULTS, Recorded(seed=5))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_clock_that_jumps() -> None:
    weather(5, [*CLOCK_FAULTS], CLOCK_FAULTS, Recorded(seed=5))

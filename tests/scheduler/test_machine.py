"""Property tests of the machine: any order of anything that may happen, and a fair world afterwards."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from machine_world import real
from properties import PROPERTIES, Story, stories

MACHINE = real()


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_property(name: str) -> None:
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(story=stories())
    def holds(story: Story) -> None:
        PROPERTIES[name](MACHINE, story)

    holds()

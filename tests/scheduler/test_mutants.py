"""The properties have teeth: each planted fault breaks one of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from machine_world import Machine, Wrong, mutated
from mutants import MUTANTS, Mutant
from properties import PROPERTIES, Story, stories


def caught(on: Machine, name: str, stories_told: int) -> bool:
    """Whether property `name` finds the fault in so many stories."""

    @settings(
        max_examples=stories_told,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(story=stories())
    def holds(story: Story) -> None:
        PROPERTIES[name](on, story)

    try:
        holds()
    except (Wrong, on.invariants.BrokenInvariant, on.machine.Circling):
        return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutant_dies(mutant: Mutant) -> None:
    on = mutated(mutant.file, mutant.old, mutant.new)
    dead = any(caught(on, name, stories_told) for stories_told in (40, 400) for name in PROPERTIES)
    assert dead, f"{mutant.name} survives"


def test_a_mutation_that_no_longer_fits_is_told() -> None:
    with pytest.raises(LookupError, match="0 times"):
        mutated("stages", "text that is nowhere", "")

"""The properties have teeth: each planted fault breaks one of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from machine_world import Machine, Wrong, mutated
from mutants import MUTANTS, Mutant
from properties import PROPERTIES, Story, stories


def caught(on: Machine, name: str) -> bool:
    """Whether property `name` finds the fault."""

    @settings(
        max_examples=400,
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
    assert any(caught(on, name) for name in PROPERTIES), f"{mutant.name} survives"


def test_a_mutation_that_no_longer_fits_is_told() -> None:
    with pytest.raises(LookupError, match="0 times"):
        mutated("stages", "text that is nowhere", "")

"""No level fails on the clean system, for any recipe."""

from __future__ import annotations

import pytest
from climbs import RECIPES, climbed, spec_of, story
from defects import contract_with

from syncline.lab.ladder.climb import LEVELS

SEEDS = 20


@pytest.mark.parametrize(("recipe", "model"), RECIPES)
def test_a_clean_system_climbs_all_levels(recipe: str, model: str) -> None:
    report = climbed(spec_of(recipe, model))
    assert report.failed_at is None, story(report)
    assert len(report.results) == len(LEVELS)
    assert all(result.checks for result in report.results if result.level != 3 or recipe != "bf16")


def test_a_job_that_replays_routes_climbs_too() -> None:
    spec = spec_of("unified_fp8", "tiny-moe")
    replaying = spec.trainer.model_copy(update={"router_replay": True})
    report = climbed(spec.model_copy(update={"trainer": replaying}), (4, 5, 7))
    assert report.failed_at is None, story(report)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, SEEDS))
def test_no_level_fails_on_the_clean_system_for_any_seed(seed: int) -> None:
    alarms = []
    for recipe, model in RECIPES:
        report = climbed(spec_of(recipe, model, seed))
        if report.failed_at is not None:
            alarms.append(f"{recipe} on {model}: {story(report)}")
    assert not alarms


def test_an_adapter_changes_under_running_requests_where_its_contract_lets_it() -> None:
    """Spans record which adapter sampled what, and each is of that version on a cold engine."""
    spec = contract_with(in_flight=None)(spec_of("lora_frozen_mxfp4", "tiny-kimi"))
    report = climbed(spec, (6,))
    assert report.failed_at is None, story(report)
    told = {check.name for check in report.results[0].checks}
    assert {"each span is of the version that it names", "each span names its version's adapter"} <= told

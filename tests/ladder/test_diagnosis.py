"""Each symptom of the source text's section 6.1, from a system that has it: what the ladder says of it."""

from __future__ import annotations

import pytest
from climbs import climbed, spec_of, story
from defects import DEFECTS, contract_with

from syncline.contract.recipes import RECIPES
from syncline.lab.ladder.diagnosis import diagnose
from syncline.lab.ladder.records import Check, Diagnosis, Report, Result


def said_of(name: str) -> tuple[Report, str]:
    """A climb from the defect's own level on, and all that its diagnosis says."""
    defect = next(d for d in DEFECTS if d.name == name)
    with defect.broken():
        report = climbed(defect.asked(spec_of(defect.recipe, defect.model)), (defect.level,))
    said = report.diagnosis
    assert said is not None
    assert said.check_next
    return report, f"{said.symptom}. {said.cause}. {said.check_next}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("token shift", ("token alignment", "operator coverage")),
        ("swapped nibbles", ("nibble order", "layout")),
        ("an activation that stays wide", ("an operand that stays wide",)),
        ("missing exception: the router in few bits", ("router", "families.keep")),
    ],
)
def test_a_disagreement_at_the_first_same_version_check(name: str, words: tuple[str, ...]) -> None:
    """Token alignment, quantization, layout, operator coverage: each from where it first appears."""
    _, said = said_of(name)
    assert all(word in said for word in words), said


def test_a_difference_that_begins_at_one_moe_layer() -> None:
    report, said = said_of("experts of one layer packed in another order")
    assert [result.level for result in report.results] == [4, 5], "level 5 says more of level 4's failure"
    for words in ("begins at one MoE layer", "number 1", "expert packing", "router inputs"):
        assert words in said, said


def test_an_initial_load_that_matches_and_an_update_that_does_not() -> None:
    _, said = said_of("one fused tensor of the version before")
    for words in ("the first load matches", "shard reconstruction", "fusion", "packing", "activation"):
        assert words in said, said


def test_an_adapter_whose_bytes_arrive_without_changing_behaviour() -> None:
    _, said = said_of("adapter installed and not read")
    for words in ("bytes arrived", "not read", "manifest's digests", "active version", "kernel reads"):
        assert words in said, said
    _, mixed = said_of("mixed adapter version")
    assert "some of an adapter's tensors" in mixed, mixed


def test_a_drift_that_depends_on_the_context_s_length() -> None:
    report, said = said_of("recurrent state that drifts")
    assert "recurrent state" in said
    grown = {check.name for check in report.results[-1].failed}
    assert "the gap does not grow with the context" in grown, story(report)
    alone = Check(name="the gap does not grow with the context", found=1, bound=0.1, source="")
    only = diagnose([Result(level=5, checks=(alone,), seconds=0)])
    assert isinstance(only, Diagnosis)
    assert "grows with the context" in only.symptom
    assert "KV cache, recurrent state" in only.cause


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DGrad through the wrong weight", ("the forward pass matches", "DGrad or WGrad")),
        ("WGrad without its last tile", ("DGrad or WGrad",)),
        ("moments rounded to BF16", ("narrower", "moments were cast")),
        ("router replay misaligned", ("a route in replay",)),
    ],
)
def test_gradients_that_part_after_a_matched_forward(name: str, words: tuple[str, ...]) -> None:
    _, said = said_of(name)
    assert all(word in said for word in words), said


def test_a_speedup_that_is_missing() -> None:
    _, said = said_of("scales constructed anew for every product")
    for words in ("no speed", "scale construction", "transposes", "ragged GEMMs", "launch gaps"):
        assert words in said, said


@pytest.mark.parametrize(("recipe", "model"), [("lora_frozen_mxfp4", "tiny-kimi"), ("glm52", "tiny-glm")])
def test_a_stable_baseline_is_no_failure_and_a_drift_from_it_is(recipe: str, model: str) -> None:
    """K3 and GLM-5.2 have a gap by design: inside the stated band it holds, and the same gap outside one does not."""
    spec = spec_of(recipe, model)
    report = climbed(spec, (4,))
    assert report.failed_at is None, story(report)
    own = next(check for check in report.results[0].checks if check.name == "the trainer's own numerics")
    matched = next(check for check in report.results[0].checks if check.name == "matched numerics")
    assert own.found > 100 * matched.found
    band = RECIPES[recipe].expected
    drifted = contract_with(expected=type(band)(low=0.0, high=own.found / 2))(spec)
    report = climbed(drifted, (4,))
    assert report.failed_at == 4
    assert report.diagnosis is not None
    assert "further from rollout than the contract expects" in report.diagnosis.symptom

"""Contracts that contradict themselves: each is refused with the key that is wrong, and nothing else is."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems
from syncline.contract.precision import PrecisionContract, Variant, with_variant
from syncline.contract.precision_rules import contradictions
from syncline.contract.recipes import RECIPES, BadContract, read
from syncline.contract.schemes import SCHEMES
from syncline.contract.spec_text import SpecError, parse_json, parse_toml

FP8 = {"name": "linear", "match": ["*_proj.weight"], "weight": "fp8_block", "activation": "fp8_tile"}
INT4 = {"name": "linear", "match": ["*_proj.weight"], "weight": "int4_g32"}
NVFP4 = {"name": "linear", "match": ["*_proj.weight"], "weight": "nvfp4", "activation": "nvfp4_row"}
LORA = {"rank": 8, "alpha": 16.0, "targets": ["*.q_proj.weight"]}


def contract(**keys: Any) -> PrecisionContract:
    return read({"name": "mine", **keys}, "mine")


def table(name: str, **changes: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(SCHEMES[name]), **changes}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_shipped_recipes_say_nothing_that_contradicts_itself(name: str) -> None:
    assert contradictions(RECIPES[name]) == []


@pytest.mark.parametrize("variant", get_args(Variant))
@pytest.mark.parametrize("name", [name for name, recipe in sorted(RECIPES.items()) if recipe.families])
def test_nor_do_their_variants(name: str, variant: Variant) -> None:
    assert contradictions(with_variant(RECIPES[name], variant)) == []


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("no name", {"name": ""}, "name"),
    ("family without a name", {"families": [{**FP8, "name": ""}]}, "families.0.name"),
    ("family twice", {"families": [FP8, {**FP8, "match": ["x"]}]}, "families.1.name"),
    ("family of nothing", {"families": [{**FP8, "match": []}]}, "families.0.match"),
    (
        "rule of another format",
        {"families": [{**INT4, "weight": table("int4_g32", rule="pow2")}]},
        "families.0.weight",
    ),
    ("mxfp8 by 64", {"families": [{**INT4, "weight": table("mxfp8", columns=64)}]}, "families.0.weight"),
    ("weight per row", {"families": [{**INT4, "weight": "nvfp4_row"}]}, "families.0.weight.outer"),
    (
        "activation per tensor",
        {"families": [{**NVFP4, "activation": "nvfp4"}]},
        "families.0.activation.outer",
    ),
    (
        "activation in square blocks",
        {"families": [{**FP8, "activation": "fp8_block"}]},
        "families.0.activation.rows",
    ),
    (
        "one kernel, two formats",
        {"families": [{**FP8, "activation": "mxfp8"}], "rollout": {"kernel": "codes"}},
        "families.0.activation.format",
    ),
    (
        "one kernel, two group sizes",
        {
            "families": [{**FP8, "activation": table("fp8_tile", columns=64)}],
            "rollout": {"kernel": "codes"},
        },
        "families.0.activation.columns",
    ),
    ("fused fp8", {"families": [{**FP8, "fuse": [["gate_proj", "up_proj"]]}]}, "families.0.fuse"),
    ("fused alone", {"families": [{**NVFP4, "fuse": [["gate_proj"]]}]}, "families.0.fuse.0"),
    (
        "fused twice",
        {"families": [{**NVFP4, "fuse": [["q_proj", "k_proj"], ["k_proj", "v_proj"]]}]},
        "families.0.fuse",
    ),
    ("codes of nothing", {"trainer": {"fprop": {"right": "codes"}}}, "trainer.fprop.right"),
    ("kernel of nothing", {"rollout": {"kernel": "codes"}}, "rollout.kernel"),
    (
        "X of a weight-only family",
        {"families": [INT4], "trainer": {"fprop": {"left": "codes", "right": "codes"}}},
        "trainer.fprop.left",
    ),
    (
        "X of one weight-only family among others",
        {
            "families": [FP8, {**INT4, "name": "rest", "match": ["x"]}],
            "trainer": {"fprop": {"left": "reconstructed", "right": "reconstructed"}},
        },
        "trainer.fprop.left",
    ),
    (
        "WGrad of a weight-only family",
        {"families": [INT4], "trainer": {"wgrad": {"right": "requantised"}}},
        "trainer.wgrad.right",
    ),
    (
        "G_Y of a weight-only family",
        {"families": [INT4], "trainer": {"dgrad": {"left": "codes", "right": "codes"}}},
        "trainer.dgrad.left",
    ),
    (
        "FProp anew",
        {"families": [FP8], "trainer": {"fprop": {"right": "requantised"}}},
        "trainer.fprop.right",
    ),
    (
        "G_Y reconstructed",
        {"families": [FP8], "trainer": {"dgrad": {"left": "reconstructed"}}},
        "trainer.dgrad.left",
    ),
    (
        "DGrad from codes that FProp never made",
        {"families": [FP8], "trainer": {"dgrad": {"right": "reconstructed"}}},
        "trainer.dgrad.right",
    ),
    (
        "WGrad from codes that FProp never made",
        {
            "families": [FP8],
            "trainer": {"fprop": {"right": "reconstructed"}, "wgrad": {"right": "reconstructed"}},
        },
        "trainer.wgrad.right",
    ),
    (
        "codes on the left alone",
        {"families": [FP8], "trainer": {"fprop": {"left": "codes", "right": "reconstructed"}}},
        "trainer.fprop.right",
    ),
    (
        "FP8 gather with Adam on the CPU",
        {"families": [FP8], "trainer": {"gather": "fp8_block", "adam_offload": True}},
        "trainer.gather",
    ),
    ("FP8 gather of INT4", {"families": [INT4], "trainer": {"gather": "fp8_block"}}, "trainer.gather"),
    ("FP8 gather of nothing", {"trainer": {"gather": "fp8_block"}}, "trainer.gather"),
    (
        "FP8 gather of a frozen base",
        {"families": [FP8], "trainer": {"gather": "fp8_block"}, "adapter": LORA},
        "trainer.gather",
    ),
    (
        "the engine quantises INT4",
        {"families": [INT4], "convert": {"route": "bf16_bridge"}},
        "convert.route",
    ),
    (
        "a BF16 bridge under an FP32 forward",
        {
            "families": [FP8],
            "convert": {"route": "bf16_bridge"},
            "trainer": {"parameters": "fp32", "fprop": {"right": "reconstructed"}},
        },
        "convert.route",
    ),
    (
        "the bridge ends in the engine, and sync is told to quantise",
        {"families": [FP8], "convert": {"route": "bf16_bridge", "place": "sync"}},
        "convert.place",
    ),
    (
        "artefacts are not made in the engine",
        {"families": [FP8], "convert": {"place": "rollout_worker"}},
        "convert.place",
    ),
    ("adapter of rank 0", {"adapter": {**LORA, "rank": 0}}, "adapter.rank"),
    ("adapter without alpha", {"adapter": {**LORA, "alpha": 0.0}}, "adapter.alpha"),
    ("adapter of nothing", {"adapter": {**LORA, "targets": []}}, "adapter.targets"),
    ("adapter twice", {"adapter": {**LORA, "targets": ["a", "a"]}}, "adapter.targets"),
    (
        "WGrad of a frozen base",
        {"families": [FP8], "adapter": LORA, "trainer": {"wgrad": {"left": "codes", "right": "codes"}}},
        "trainer.wgrad.left",
    ),
    ("no tolerance", {"convert": {"tolerance": 0.0}}, "convert.tolerance"),
    ("tolerance without end", {"convert": {"tolerance": float("inf")}}, "convert.tolerance"),
    ("expected below nothing", {"expected": {"low": -1.0}}, "expected.low"),
    ("expected upside down", {"expected": {"low": 0.2, "high": 0.1}}, "expected.high"),
    ("negative lag", {"max_lag": -1}, "max_lag"),
]


@pytest.mark.parametrize(
    ("keys", "path"), [c[1:] for c in CONTRADICTIONS], ids=[c[0] for c in CONTRADICTIONS]
)
def test_a_contradiction_is_named_by_its_key(keys: dict[str, Any], path: str) -> None:
    found = {problem.path: problem for problem in contradictions(contract(**keys))}
    assert path in found
    assert found[path].message
    assert found[path].hint


def test_a_contract_that_says_one_thing_per_key_has_none() -> None:
    """The same parts without the contradictions: no rule refuses what is right."""
    right = contract(
        families=[
            {**FP8, "keep": ["*.o_proj.weight"]},
            {**NVFP4, "name": "experts", "match": ["*.experts.*"], "fuse": [["gate_proj", "up_proj"]]},
        ],
        rollout={"kernel": "codes", "kv_cache": "fp8_e4m3"},
        trainer={
            "fprop": {"left": "codes", "right": "codes"},
            "dgrad": {"left": "requantised", "right": "reconstructed"},
            "wgrad": {"right": "reconstructed"},
        },
        expected={"low": 0.0, "high": 0.1},
        max_lag=2,
    )
    assert contradictions(right) == []


# ---- in a job -------------------------------------------------------------------------------------------------
LEAST: dict[str, Any] = {"name": "run", "model": {"name": "tiny"}}
CUSTOM: dict[str, Any] = {
    "name": "mine",
    "families": [INT4],
    "trainer": {"fprop": {"right": "reconstructed"}},
}


def spec(precision: dict[str, Any], **keys: Any) -> JobSpec:
    return JobSpec.model_validate({**LEAST, "precision": precision, **keys})


def refusals(precision: dict[str, Any], **keys: Any) -> dict[str, str]:
    return {problem.path: problem.message for problem in problems(spec(precision, **keys))}


def test_a_custom_contract_is_honoured_and_survives_its_canonical_form() -> None:
    made = spec({"custom": CUSTOM})
    assert problems(made) == []
    assert made.precision.recipe is None
    assert made.contract() == contract(families=[INT4], trainer={"fprop": {"right": "reconstructed"}})
    again = parse_json(made.canonical())
    assert again == made
    assert again.contract_digest() == made.contract_digest()


def test_a_custom_contract_may_be_written_in_toml_as_a_recipe_is() -> None:
    text = """
        name = "run"
        model.name = "tiny"
        [precision.custom]
        name = "mine"
        [[precision.custom.families]]
        name = "linear"
        match = ["*_proj.weight"]
        weight = { format = "int4", rows = 1, columns = 64, rule = "amax/7" }
    """
    family = parse_toml(text).contract().families[0]
    assert (family.weight.columns, family.activation) == (64, None)


def test_a_variant_changes_a_custom_contract_too() -> None:
    assert spec({"custom": CUSTOM, "variant": "plain"}).contract().trainer.fprop.right == "original"


@pytest.mark.parametrize(
    ("precision", "path"),
    [
        ({"recipe": "mxfp8", "custom": CUSTOM}, "precision.recipe"),
        ({"recipe": None}, "precision.recipe"),
        ({"custom": {**CUSTOM, "name": "mxfp8"}}, "precision.custom.name"),
        ({"custom": {}}, "precision.custom.name"),
        ({"custom": {**CUSTOM, "famlies": []}}, "precision.custom.famlies"),
        ({"custom": {**CUSTOM, "families": 3}}, "precision.custom.families"),
        ({"custom": {**CUSTOM, "families": [3]}}, "precision.custom.families.0"),
        (
            {"custom": {**CUSTOM, "families": [{**INT4, "weight": "int5"}]}},
            "precision.custom.families.0.weight",
        ),
        ({"custom": {**CUSTOM, "families": [{**INT4, "match": [3]}]}}, "precision.custom.families.0.match.0"),
        ({"custom": {**CUSTOM, "convert": {"tolerance": -1.0}}}, "precision.custom.convert.tolerance"),
        ({"recipe": "bf16", "variant": "qdq"}, "precision.variant"),
        ({"recipe": "bf16", "variant": "plain"}, "precision.variant"),
    ],
)
def test_a_precision_that_cannot_be_is_refused_with_its_key(precision: dict[str, Any], path: str) -> None:
    assert path in refusals(precision)


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"convret": {}}, "convret", "did you mean 'convert'?"),
        ({"trainer": {"fprop": {"rihgt": "codes"}}}, "trainer.fprop.rihgt", "did you mean 'right'?"),
        ({"families": [{**INT4, "wieght": "mxfp4"}]}, "families.0.wieght", "did you mean 'weight'?"),
        ({"adapter": {"zzz": 1}}, "adapter.zzz", "known keys here: rank, alpha, targets, rank_stable"),
        ({"families": [{**INT4, "match": "*"}]}, "families.0.match", "should be a list, not a string"),
        (
            {"families": [{**INT4, "weight": 4}]},
            "families.0.weight",
            "the name of a scheme, or its table, not 4",
        ),
        ({"rollout": {"kernel": "code"}}, "rollout.kernel", "is 'code'; one of 'dequantised', 'codes'"),
        ({"in_flight": "kept"}, "in_flight", "is 'kept'; one of 'drain', 'continue_old', 'in_place'"),
    ],
)
def test_what_is_wrong_in_a_contract_says_what_would_be_right(
    changes: dict[str, Any], key: str, says: str
) -> None:
    told = refusals({"custom": {**CUSTOM, **changes}})
    assert list(told) == [f"precision.custom.{key}"]
    assert says in told[f"precision.custom.{key}"]


def test_a_recipe_without_families_refuses_variants_in_one_sentence() -> None:
    with pytest.raises(SpecError) as refused:
        parse_json(
            '{"name": "run", "model": {"name": "t"}, "precision": {"recipe": "bf16", "variant": "qdq"}}'
        )
    assert [problem.message for problem in refused.value.problems] == [
        "'qdq', and contract bf16 quantises nothing: it has no variants"
    ]


def test_a_custom_name_of_another_type_is_told_as_such() -> None:
    assert "precision.custom.name" in refusals({"custom": {"name": ["bf16"]}})


def test_the_schedule_keeps_to_what_the_contract_allows() -> None:
    assert "schedule.in_flight" in refusals({"recipe": "qwen38"})
    assert refusals({"recipe": "qwen38"}, schedule={"in_flight": "drain"}) == {}
    bound = {"custom": {**CUSTOM, "max_lag": 1}}
    assert "schedule.max_lag" in refusals(bound, schedule={"max_lag": 2})
    assert refusals(bound, schedule={"max_lag": 1}) == {}


def test_unknown_keys_of_precision_itself_are_refused() -> None:
    with pytest.raises(SpecError, match=r"precision\.custm"):
        parse_json('{"name": "run", "model": {"name": "tiny"}, "precision": {"custm": {}}}')


def test_reading_leaves_its_input_alone() -> None:
    data: dict[str, Any] = {"name": "mine", "families": [dict(FP8)]}
    read(data, "mine")
    assert data == {"name": "mine", "families": [FP8]}
    with pytest.raises(BadContract, match=r"^here\.nam: is an unknown key; did you mean 'name'\?$"):
        read({"nam": "x"}, "here")

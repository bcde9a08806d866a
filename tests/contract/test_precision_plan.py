"""Contracts resolved against models: each misfit is named by tensor and by key, and splits keep blocks whole."""

from __future__ import annotations

from typing import Any

import pytest
from model_shapes import Shapes, dense, glm, moe

from syncline.contract.partition import check_partition, legal_sizes
from syncline.contract.plan import BadPlan, PrecisionPlan, resolve
from syncline.contract.recipes import RECIPES, read

NVFP4 = {
    "name": "linear",
    "match": ["model.layers.*_proj.weight"],
    "weight": "nvfp4",
    "activation": "nvfp4_row",
}
FUSE = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
MXFP8 = {"name": "linear", "match": ["model.layers.*_proj.weight"], "weight": "mxfp8"}


def plan(families: list[dict[str, Any]], shapes: Shapes | None = None, **keys: Any) -> PrecisionPlan:
    return resolve(read({"name": "mine", "families": families, **keys}, "mine"), shapes or moe(1))


SMALL = {**dense(1), "model.layers.0.mlp.down_proj.weight": (256, 500)}
CUBE = {**dense(1), "model.layers.0.conv_proj.weight": (8, 1, 4)}
LORA = {"rank": 2, "alpha": 1.0}
MISFITS: list[tuple[str, list[dict[str, Any]], Shapes, dict[str, Any], str]] = [
    (
        "nothing matched",
        [{**MXFP8, "match": ["*_proj.weight", "*.qkv.weight"]}],
        moe(1),
        {},
        "families.0.match.1",
    ),
    ("nothing kept", [{**MXFP8, "keep": ["*.indexer.*"]}], moe(1), {}, "families.0.keep.0"),
    ("all sensitive", [{**MXFP8, "match": ["*.gate.weight"]}], moe(1), {}, "families.0.match"),
    (
        "two families",
        [MXFP8, {**MXFP8, "name": "b", "match": ["*.o_proj.weight"]}],
        moe(1),
        {},
        "families.1.match",
    ),
    ("no matrix", [MXFP8], CUBE, {}, "families.0.match"),
    ("no multiple", [MXFP8], SMALL, {}, "families.0.weight"),
    ("undeclared outer scale", [NVFP4], moe(1), {}, "families.0.fuse"),
    ("half declared", [{**NVFP4, "fuse": [["gate_proj", "up_proj"]]}], moe(1), {}, "families.0.fuse"),
    ("partner kept", [{**NVFP4, "fuse": FUSE, "keep": ["*.up_proj.weight"]}], moe(1), {}, "families.0.fuse"),
    ("no target", [], moe(1), {"adapter": {**LORA, "targets": ["*.qkv.weight"]}}, "adapter.targets.0"),
    ("target of norms", [], moe(1), {"adapter": {**LORA, "targets": ["*_norm.weight"]}}, "adapter.targets.0"),
    (
        "target of routers",
        [],
        moe(1),
        {"adapter": {**LORA, "targets": ["*.gate.weight"]}},
        "adapter.targets.0",
    ),
]


@pytest.mark.parametrize(
    ("families", "shapes", "keys", "key"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS]
)
def test_a_misfit_is_named_by_its_key(
    families: list[dict[str, Any]], shapes: Shapes, keys: dict[str, Any], key: str
) -> None:
    with pytest.raises(BadPlan) as caught:
        plan(families, shapes, **keys)
    assert caught.value.key == key
    assert str(caught.value)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ({**MXFP8, "match": ["*.gate.weight"]}, "such as model.layers.0.mlp.gate.weight (wide: router"),
        ({**MXFP8, "keep": ["*.indexer.*"]}, "leave it out, or take a contract that is meant for this model"),
        ({**MXFP8, "match": ["*.qkv.weight"]}, "whose names are like model.layers.0."),
    ],
)
def test_a_misfit_says_what_would_fit(family: dict[str, Any], says: str) -> None:
    with pytest.raises(BadPlan) as caught:
        plan([family])
    assert says in str(caught.value)


def test_a_module_without_its_partners_needs_none() -> None:
    """Latent attention has a q projection and neither k nor v: its outer scale is its own."""
    shapes = {
        name: shape for name, shape in dense(1).items() if ".k_proj." not in name and ".v_proj." not in name
    }
    made = plan([{**NVFP4, "fuse": FUSE}], shapes)
    assert [e.outer for e in made.low_bit() if ".q_proj." in e.name] == [
        "model.layers.0.self_attn.q_proj+k_proj+v_proj"
    ]


def test_why_a_tensor_is_what_it_is_can_be_read() -> None:
    reasons = {e.name: e.reason for e in plan([{**MXFP8, "keep": ["*.o_proj.weight"]}]).entries}
    assert reasons["model.layers.0.mlp.gate.weight"] == "wide: router"
    assert reasons["model.layers.0.self_attn.o_proj.weight"] == "wide: linear keeps it with '*.o_proj.weight'"
    assert reasons["lm_head.weight"] == "wide: output head"
    assert reasons["model.layers.0.self_attn.q_proj.weight"].startswith("mxfp8: linear matches it")


# ---- tensor parallel ------------------------------------------------------------------------------------------
def test_a_split_that_keeps_blocks_whole_is_allowed() -> None:
    made = resolve(RECIPES["unified_fp8"], dense(1))
    for tp in (1, 2):  # K and V have 256 rows: two shards of 128
        check_partition(made, tp)


def test_a_split_through_a_block_is_refused_with_the_legal_sizes() -> None:
    made = resolve(RECIPES["unified_fp8"], dense(1))
    with pytest.raises(
        BadPlan, match=r"down_proj\.weight: tp 8 cuts its 512 columns into 64, .* 128; legal: 1, 2, 4"
    ) as c:
        check_partition(made, 8)
    assert c.value.key == "tp"


@pytest.mark.parametrize(
    ("scheme", "leaf", "legal"),
    [
        ("fp8_block", "q_proj", (1, 2, 4)),
        ("fp8_block", "o_proj", (1, 2, 4)),
        ("int4_g128", "o_proj", (1, 2, 4)),
        ("int4_g32", "o_proj", (1, 2, 4, 8, 16)),
        ("mxfp8", "o_proj", (1, 2, 4, 8, 16)),
        ("nvfp4", "o_proj", (1, 2, 4, 8, 16, 32)),
    ],
)
def test_legal_sizes_follow_the_block_along_the_axis_that_is_cut(
    scheme: str, leaf: str, legal: tuple[int, ...]
) -> None:
    made = plan([{**MXFP8, "weight": scheme, "match": [f"*.{leaf}.weight"]}], dense(1))
    assert legal_sizes(made.low_bit()[0]) == legal


def test_along_rows_a_block_of_one_row_divides_everything() -> None:
    made = plan([{**MXFP8, "match": ["*.q_proj.weight"]}], dense(1))
    assert legal_sizes(made.low_bit()[0]) == tuple(n for n in range(1, 513) if 512 % n == 0)
    with pytest.raises(BadPlan, match="tp 3"):
        check_partition(made, 3)


def test_experts_may_be_cut_by_another_size() -> None:
    made = plan([{**MXFP8, "match": ["*.experts.*.down_proj.weight"]}])
    check_partition(made, 3, expert_tp=1)
    with pytest.raises(BadPlan) as caught:
        check_partition(made, 1, expert_tp=3)
    assert caught.value.key == "expert_tp"


def test_what_is_held_whole_is_never_cut_and_what_is_unknown_is_refused() -> None:
    check_partition(plan([{**MXFP8, "match": ["*.q_a_proj.weight"]}], glm()), 7)
    unknown = plan([{**MXFP8, "match": ["*.wq_b.weight"]}], glm())
    check_partition(unknown, 1)
    with pytest.raises(BadPlan, match="not known"):
        check_partition(unknown, 2)
    with pytest.raises(BadPlan, match="at least 1"):
        check_partition(unknown, 0)

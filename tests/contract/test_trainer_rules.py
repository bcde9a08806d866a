"""What a trainer engine has not is refused at submit, with the key and the way out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems
from syncline.contract.recipes import RECIPES


def found(recipe: str = "bf16", **trainer: Any) -> list[tuple[str, str]]:
    precision = trainer.pop("precision", {"recipe": recipe})
    spec = {"name": "t", "model": {"name": "tiny-moe"}, "trainer": trainer, "precision": precision}
    return [
        (p.path, f"{p.message}; {p.hint}") for p in problems(JobSpec.model_validate_json(json.dumps(spec)))
    ]


def refused(at: str, says: str, problems: list[tuple[str, str]]) -> bool:
    return any(path == at and says in text for path, text in problems)


def test_the_torch_engine_has_no_ranks_and_runs_no_layer_again() -> None:
    assert refused("trainer.parallel", "the torch engine is one process", found(parallel={"tp": 2}))
    assert refused("trainer.recompute", "use trainer.engine = 'megatron'", found(recompute="layers"))
    assert not found()


def test_megatrons_ranks_must_go_together() -> None:
    assert not found(engine="megatron", parallel={"tp": 2}, recompute="layers")
    both = found(engine="megatron", parallel={"tp": 2, "ep": 4})
    assert refused("trainer.parallel", "etp 1 x ep 4 does not divide the 2 ranks", both)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("mxfp8", "--fp8-recipe mxfp8 --bf16 need Transformer Engine"),
        ("unified_fp8", "--fp8-recipe blockwise --bf16 need Transformer Engine"),
        ("nvfp4_selective", "--fp4-recipe nvfp4 --bf16 need Transformer Engine"),
        ("nvfp4_w4a4", "its outer scale is of a whole tensor"),
    ],
)
def test_recipes_that_megatron_has_not_are_refused_with_the_reason(recipe: str, says: str) -> None:
    assert refused("precision.recipe", says, found(recipe, engine="megatron"))
    assert not found(recipe), "the torch engine emulates it"


def test_megatron_fakes_what_it_has_no_kernel_for() -> None:
    for recipe in ("int4_qat_w4a16", "mxfp4_qat_w4a16", "lora_frozen_mxfp4"):
        text = [t for path, t in found(recipe, engine="megatron") if "trainer.engine 'megatron'" in t]
        assert not text, (recipe, text)
    qdq = {"recipe": "mxfp8", "variant": "qdq"}
    assert not found(engine="megatron", precision=qdq)


@pytest.mark.parametrize(
    ("key", "change", "says"),
    [
        ("convert.place", {"convert": {"place": "trainer_rank"}}, "sync quantises"),
        ("trainer.gather", {"trainer": {"gather": "fp8_block"}}, "owners of masters send"),
    ],
)
def test_custom_contracts_are_refused_at_their_own_key(key: str, change: dict[str, Any], says: str) -> None:
    family = {"name": "linear", "match": ["model.layers.*_proj.weight"], "weight": "fp8_block"}
    custom = {"name": "mine", "families": [family], **change}
    assert refused(f"precision.custom.{key}", says, found(engine="megatron", precision={"custom": custom}))


def test_every_recipe_is_run_or_refused_by_name() -> None:
    for recipe in RECIPES:
        for path, text in found(recipe, engine="megatron"):
            assert path
            assert text.strip("; ")

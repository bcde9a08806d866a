"""A job whose trainer makes the codes: the same guarantees, and its record says where they were made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from guarantees import check
from specs import spec
from stack import Stack

from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_trainer_converts(stack: Stack) -> None:
    recipe: dict[str, Any] = msgspec.to_builtins(RECIPES["unified_fp8"])
    recipe |= {"name": "on_the_rank", "convert": recipe["convert"] | {"place": "trainer_rank"}}
    given = spec(precision={"custom": recipe}, schedule={"updates": 3}, rollout={"workers": 1})
    assert msgspec.convert(recipe, PrecisionContract).convert.where == "trainer_rank"
    job = stack.submit(given)
    assert stack.wait(job, 200)["state"] == "succeeded"
    check(stack.runs / job, stack.summary(job), 3, 1)
    trace = {part["component"]: part for part in stack.get(f"/v1/jobs/{job}/precision")["trace"]}
    assert trace["convert"]["place"] == "trainer_rank"
    assert trace["convert"]["bytes"]["codes"] > trace["convert"]["bytes"]["scales"] > 0
    assert trace["rollout"]["bytes"]["codes"] > 0

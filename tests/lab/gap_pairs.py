"""Pairs of engines on the committed policies, for the tests of the same-version gap."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncline.contract.job import JobSpec, PrecisionSpec
from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.schemes import SCHEMES
from syncline.contract.token_path import Trajectory
from syncline.lab.measure import behaviour, gap
from syncline.lab.pair import Pair, one_thread
from syncline.lab.records import Gap
from syncline.lab.task import Architecture, sort_spec

POLICIES = Path(__file__).parent / "policies"
PROMPTS = range(10_000, 10_512)  # none of them was trained on
BANDS = {
    "unified_fp8": (0.02, 0.08),
    "mxfp8": (0.02, 0.08),
    "int4_qat_w4a16": (0.07, 0.2),
    "mxfp4_qat_w4a16": (0.07, 0.2),
    "nvfp4_w4a16": (0.07, 0.2),
    "nvfp4_w4a4": (0.1, 0.25),
}
"""Format -> mean |log-prob difference| of a BF16 trainer against the quantised rollout."""
MATCHED = {  # the trainer variant that multiplies as this format's rollout does
    "unified_fp8": "real",
    "mxfp8": "real",
    "int4_qat_w4a16": "qdq",
    "mxfp4_qat_w4a16": "qdq",
    "nvfp4_w4a16": "qdq",
    "nvfp4_w4a4": "forward_qdq",
}
ARCHITECTURES: tuple[Architecture, ...] = ("dense", "moe")


def contract_of(name: str) -> PrecisionContract:
    """The shipped recipe, or NVFP4 in weights alone, which none ships."""
    if name != "nvfp4_w4a16":
        return RECIPES[name]
    w4a4 = RECIPES["nvfp4_w4a4"]
    weight_only = msgspec.structs.replace(w4a4.families[0], activation=None)
    assert weight_only.weight == SCHEMES["nvfp4"]
    return msgspec.structs.replace(w4a4, name=name, families=(weight_only,))


def spec_of(
    architecture: Architecture,
    contract: PrecisionContract,
    variant: str,
    *,
    groups: int = len(PROMPTS),
    group_size: int = 2,
) -> JobSpec:
    """A job that holds the committed policy under `contract`."""
    custom = json.loads(msgspec.json.encode(contract))
    precision: dict[str, Any] = {"custom": custom, "recipe": None, "variant": variant}
    base = sort_spec(architecture, weights="pretrained", groups=groups, group_size=group_size)
    return base.model_copy(update={"precision": PrecisionSpec.model_validate(precision)})


class Measured(msgspec.Struct, frozen=True):
    """One pair on all prompts."""

    gap: Gap
    routes: tuple[float, ...]
    records: list[Trajectory]
    reward: float


def measured_of(architecture: Architecture, contract: PrecisionContract, variant: str) -> Measured:
    """Sample all prompts under the contract's rollout and score them with this trainer."""
    one_thread()
    with tempfile.TemporaryDirectory() as scratch:
        pair = Pair(spec_of(architecture, contract, variant), POLICIES, Path(scratch))
        pair.publish()
        records = pair.sample(PROMPTS)
        routes = pair.routes(records)
        values = [reward.value or 0.0 for reward in pair.rewards(records).values()]
        return Measured(
            gap=gap(pair.score_trainer(records), behaviour(records)),
            routes=() if routes is None else routes.agreement,
            records=records,
            reward=sum(values) / len(values),
        )


formats = pytest.mark.parametrize("name", list(BANDS))
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)

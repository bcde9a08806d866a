"""The reference engine with low-bit weights passes the suite that every rollout engine must pass.

INT4 with wide activations: the cold models hold the values that the codes stand for, so that results are as equal as
with wide weights. Partial groups, because families differ in which sizes are multiples of 32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.rollout_engine import MakeEngine, RolloutEngineSuite

from syncline.contract.job import ModelSpec
from syncline.contract.precision import Family, PrecisionContract
from syncline.contract.schemes import Scheme
from syncline.rollout.engine import RolloutEngine
from syncline.rollout.engines.reference import ReferenceEngine

INT4 = PrecisionContract(
    name="int4_everywhere",
    families=(
        Family(
            name="linear",
            match=("model.layers.*_proj.weight",),
            weight=Scheme(format="int4", rows=1, columns=32, rule="amax/7", padding="partial"),
        ),
    ),
)


class TestReferenceEngineWithInt4Weights(RolloutEngineSuite):
    contract = INT4
    heavy = 60

    @pytest.fixture
    def make(self) -> MakeEngine:
        def made(folder: Path, job: str, key: bytes, max_running: int) -> RolloutEngine:
            spec = ModelSpec(name=folder.name)
            engine = ReferenceEngine(folder.parent, spec, job, key, max_running, contract=self.contract)
            assert engine.describe().representation == "int4"
            return engine

        return made

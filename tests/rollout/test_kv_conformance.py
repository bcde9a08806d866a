"""The reference engine with an E4M3 context passes the suite that every rollout engine must pass.

The cold models round what they store with torch's own cast. Keys that two shapes of a GEMM compute differ by about
1e-7, and now and then one lies so near the middle between two codes that it tips into the other. Then the rest of
that request differs, by up to 6e-3 here; all other requests are as equal as with a wide context.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.rollout_engine import MakeEngine, RolloutEngineSuite

from syncline.contract.job import ModelSpec
from syncline.contract.schemes import KvFormat
from syncline.rollout.engine import RolloutEngine
from syncline.rollout.engines.reference import ReferenceEngine


class TestReferenceEngineWithE4M3Context(RolloutEngineSuite):
    kv: KvFormat = "fp8_e4m3"
    tipped = 1 / 6
    tip = 9e-3  # less than what tells one version from another

    @pytest.fixture
    def make(self) -> MakeEngine:
        def made(folder: Path, job: str, key: bytes, max_running: int) -> RolloutEngine:
            spec = ModelSpec(name=folder.name)
            engine = ReferenceEngine(folder.parent, spec, job, key, max_running, kv=self.kv)
            assert engine.describe().kv == self.kv
            return engine

        return made

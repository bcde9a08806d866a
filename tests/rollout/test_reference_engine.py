"""The reference engine passes the suite that every rollout engine must pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.rollout_engine import MakeEngine, RolloutEngineSuite

from syncline.contract.job import ModelSpec
from syncline.rollout.engine import RolloutEngine
from syncline.rollout.engines.reference import ReferenceEngine


class TestReferenceEngine(RolloutEngineSuite):
    @pytest.fixture
    def make(self) -> MakeEngine:
        def made(folder: Path, job: str, key: bytes, max_running: int) -> RolloutEngine:
            return ReferenceEngine(folder.parent, ModelSpec(name=folder.name), job, key, max_running)

        return made

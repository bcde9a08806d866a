"""The rollout conformance suite on a real server. What it cannot do it says in `describe()`."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.forge import JOB, KEY, MODELS, Forge
from conformance.rollout_engine import MakeEngine, RolloutEngineSuite
from fleet import Fleet

from syncline.rollout.engine import CommitPolicy, RolloutEngine
from syncline.rollout.engines.sglang.engine import SGLangEngine

SERVED = ("tiny-dense", "tiny-moe")
"""Families of the suite that SGLang runs with its torch-native path; the others need CUDA kernels."""


class TestSGLang(RolloutEngineSuite):
    @pytest.fixture
    def make(self, fleet: Fleet, tmp_path: Path) -> MakeEngine:
        made: list[RolloutEngine] = []

        def make(folder: Path, job: str, key: bytes, max_running: int) -> RolloutEngine:
            if folder.name not in SERVED:
                pytest.skip(f"SGLang has no CPU path for {folder.name}")
            scratch = tmp_path / f"scratch-{len(made)}"
            # a second engine has a server of its own: what the first one's holds must not help it
            engine = fleet.engine(folder, scratch, job, key, max_running, number=min(len(made), 1))
            made.append(engine)
            return engine

        return make

    def allow(self, engine: RolloutEngine, policy: CommitPolicy) -> None:
        super().allow(engine, policy)
        assert isinstance(engine, SGLangEngine)
        engine.in_flight = policy
        engine.process.server.slow_down(0.02)  # versions come while requests run

    def test_sleep_gives_memory_back_and_wake_serves_the_same(self, make: MakeEngine, tmp_path: Path) -> None:
        """Without CUDA the server keeps its memory, and the description says so; the rest holds."""
        forge = Forge(tmp_path, MODELS / "tiny-dense")
        engine = self.serve(make(forge.folder, JOB, KEY, 4), forge, forge.version(0))
        assert not engine.describe().frees_memory
        before = self.scores(engine)
        engine.sleep()
        assert engine.serving is None
        assert engine.room == 0
        assert engine.wake(forge.store) == self.served(engine)[0]
        assert self.scores(engine) == before

"""The Megatron engine passes the trainer suite on one rank. Hybrid attention has no layout: it is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.trainer_engine import MODELS, MakeEngine, TrainerEngineSuite, spec_of

from syncline.contract.job import JobSpec
from syncline.trainer.engine import TrainerEngine

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

from syncline.trainer.engines.megatron.engine import MegatronEngine
from syncline.trainer.engines.megatron.families import UnknownFamily

HYBRID = "tiny-hybrid"


class TestMegatronEngine(TrainerEngineSuite):
    """The conformance suite, for the families that the engine builds."""

    @pytest.fixture
    def make(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeEngine:
        made = 0
        if HYBRID in request.node.name:
            with pytest.raises(UnknownFamily, match="qwen3_5_moe_text"):
                MegatronEngine(spec_of(HYBRID, trainer={"engine": "megatron"}), MODELS, tmp_path)
            pytest.skip("refused by name, as asserted")

        def build(spec: JobSpec) -> TrainerEngine:
            nonlocal made
            made += 1
            return MegatronEngine(spec, MODELS, tmp_path / f"scratch{made}")

        return build

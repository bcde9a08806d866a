"""The Megatron engine passes the trainer suite on one rank and on two. Hybrid attention is refused by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.trainer_engine import MODELS, MakeEngine, TrainerEngineSuite, spec_of
from safetensors.torch import save_file

from syncline.contract.job import JobSpec
from syncline.trainer.engine import TrainerEngine

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

from ranked import end_followers, gathered

from syncline.trainer.engines.megatron.engine import MegatronEngine
from syncline.trainer.engines.megatron.families import UnknownFamily

HYBRID = "tiny-hybrid"


@pytest.fixture(autouse=True, scope="module")
def no_followers_left() -> Iterator[None]:
    yield
    end_followers()


def refused(name: str, scratch: Path) -> None:
    """Skip a test of the family that the engine does not build, once it has said so."""
    if HYBRID in name:
        with pytest.raises(UnknownFamily, match="qwen3_5_moe_text"):
            MegatronEngine(spec_of(HYBRID, trainer={"engine": "megatron"}), MODELS, scratch)
        pytest.skip("refused by name, as asserted")


class TestMegatronEngine(TrainerEngineSuite):
    """The conformance suite, for the families that the engine builds."""

    @pytest.fixture
    def make(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeEngine:
        made = 0
        refused(request.node.name, tmp_path)

        def build(spec: JobSpec) -> TrainerEngine:
            nonlocal made
            made += 1
            return MegatronEngine(spec, MODELS, tmp_path / f"scratch{made}")

        return build


class Gathering(MegatronEngine):
    """An engine whose exports are as sync makes them of its shards: the suite reads full tensors."""

    def export(self, folder: Path, base: bool = True) -> dict[str, str]:
        shards = folder.with_name(f"{folder.name}.shards")
        full = gathered(super().export(shards), shards)
        folder.mkdir()
        save_file(full, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_bytes((shards / "config.json").read_bytes())
        return {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in ("model.safetensors", "config.json")
        }


class TestMegatronEngineOnTwoRanks(TrainerEngineSuite):
    """The same with each layer cut over two ranks."""

    @pytest.fixture
    def make(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeEngine:
        made = 0
        refused(request.node.name, tmp_path)

        def build(spec: JobSpec) -> TrainerEngine:
            nonlocal made
            made += 1
            parallel = spec.trainer.parallel.model_copy(update={"tp": 2})
            trainer = spec.trainer.model_copy(update={"engine": "megatron", "parallel": parallel})
            two = spec.model_copy(update={"trainer": trainer})
            return Gathering(two, MODELS, tmp_path / f"scratch{made}")

        return build

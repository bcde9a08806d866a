"""A Megatron trainer that cannot hold the model is refused at the door, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syncline.contract.job import JobSpec
from syncline.contract.spec_text import SpecError
from syncline.gateway import trainer_fit
from syncline.gateway.submission import judged
from syncline.runtime.settings import Settings

MODELS = Path(__file__).parents[2] / "examples" / "models"


def spec(model: str, engine: str = "megatron", **parallel: Any) -> JobSpec:
    trainer = {"engine": engine, "parallel": parallel}
    return JobSpec.model_validate_json(
        json.dumps({"name": "t", "model": {"name": model}, "trainer": trainer})
    )


@pytest.mark.parametrize(
    ("model", "parallel", "path", "says"),
    [
        ("tiny-hybrid", {}, "trainer.engine", "no model of type 'qwen3_5_moe_text'"),
        ("tiny-moe", {"tp": 2, "etp": 1}, "trainer.parallel", "trains wrongly without a word"),
        ("tiny-dense", {"dp": 2, "ep": 2}, "trainer.parallel", "the model has no experts"),
        ("tiny-moe", {"tp": 8, "ep": 8}, "trainer.parallel", "ep 8 does not divide 4 experts"),
        ("tiny-moe", {"pp": 3}, "trainer.parallel", "pp 3 does not divide 2 layers"),
        ("tiny-moe", {"tp": 2, "ep": 2, "etp": 2, "dp": 2, "pp": 2}, "trainer.parallel", "use etp 1 or pp 1"),
    ],
)
def test_what_the_ranks_cannot_hold_is_refused(
    model: str, parallel: dict[str, int], path: str, says: str
) -> None:
    (problem,) = trainer_fit.problems(MODELS, spec(model, "megatron", **parallel))
    assert problem.path == path
    assert says in problem.message


def test_latent_attention_is_refused_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-latent"
    folder.mkdir()
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "kv_lora_rank": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (problem,) = trainer_fit.problems(tmp_path, spec("tiny-latent", tp=2))
    assert "trains wrongly without a word" in problem.message
    assert not trainer_fit.problems(tmp_path, spec("tiny-latent", pp=2))


def test_what_fits_passes_and_other_engines_are_not_asked(tmp_path: Path) -> None:
    for parallel in ({}, {"tp": 2}, {"dp": 2, "ep": 2}, {"pp": 2}, {"tp": 2, "ep": 2}):
        assert not trainer_fit.problems(MODELS, spec("tiny-moe", "megatron", **parallel))
    assert not trainer_fit.problems(MODELS, spec("tiny-hybrid", "torch"))
    assert not trainer_fit.problems(tmp_path, spec("tiny-moe"))


def test_the_door_asks(tmp_path: Path) -> None:
    settings = Settings.read({"SYNCLINE_RUNS": str(tmp_path), "SYNCLINE_MODELS": str(MODELS)})
    with pytest.raises(SpecError, match="qwen3_5_moe_text"):
        judged(spec("tiny-hybrid"), settings)

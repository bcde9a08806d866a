"""A known perturbation proves an activation, per format; an engine that keeps something of the old version fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syncline.contract.job import JobSpec
from syncline.lab.activation import prove
from syncline.lab.pair import Pair, one_thread
from syncline.rollout.engines.weights import Weights

MODELS = Path(__file__).parents[2] / "examples" / "models"
RECIPES = [
    ("bf16", "tiny-dense", "*.q_proj.*"),
    ("unified_fp8", "tiny-dense", "*_proj.*"),
    ("int4_qat_w4a16", "tiny-dense", "*_proj.*"),
    ("nvfp4_w4a4", "tiny-dense", "*_proj.*"),
    ("lora_frozen_mxfp4", "tiny-kimi", "*"),
]


@pytest.fixture(scope="module", autouse=True)
def _threads() -> None:
    one_thread()


def pair_of(recipe: str, model: str, folder: Path) -> Pair:
    spec: dict[str, Any] = {
        "name": "t",
        "model": {"name": model},
        "precision": {"recipe": recipe},
        "task": {"options": {"game": "kind", "length": 4, "alphabet": "ab12"}},
        "sampling": {"max_tokens": 6, "min_tokens": 6},
        "batch": {"groups": 4, "group_size": 4},
        "schedule": {"in_flight": "drain"},
    }
    pair = Pair(JobSpec.model_validate_json(json.dumps(spec)), MODELS, folder)
    pair.publish()
    return pair


@pytest.mark.parametrize(("recipe", "model", "match"), RECIPES)
def test_scores_move_as_the_perturbed_trainer_says(
    recipe: str, model: str, match: str, tmp_path: Path
) -> None:
    pair = pair_of(recipe, model, tmp_path)
    # an adapter begins with B = 0; its perturbation needs something to be relative to
    records = pair.sample(range(4), 2)
    if recipe.startswith("lora"):
        pair.train(pair.sample(range(4), 4), pair.rewards(pair.sample(range(4), 4)))
        pair.publish()
    proof = prove(pair, records, tmp_path / "state", match=match, strength=0.5)
    assert proof.problem() == "", proof
    assert proof.restored
    assert all("proj" in name for name in proof.tensors)


def test_an_engine_that_keeps_a_tensor_of_the_version_before_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Weights.load

    def stale(self: Any, *args: Any, **kwargs: Any) -> str:
        scale = self.packed.slots["model.layers.0.mlp.down_proj.weight_scale"]
        before = scale.clone() if self._held else None
        done = load(self, *args, **kwargs)
        if before is not None:
            scale.copy_(before)
        return done

    pair = pair_of("int4_qat_w4a16", "tiny-dense", tmp_path)
    pair.updates += 1
    pair.publish()  # both buffers hold something from now on
    records = pair.sample(range(4), 2)
    monkeypatch.setattr(Weights, "load", stale)
    proof = prove(pair, records, tmp_path / "state", strength=0.5)
    assert "not as predicted" in proof.problem(), proof


def test_a_perturbation_that_shows_nothing_proves_nothing(tmp_path: Path) -> None:
    pair = pair_of("bf16", "tiny-dense", tmp_path)
    records = pair.sample(range(2), 2)
    assert (
        "too little" in prove(pair, records, tmp_path / "state", match="*.q_proj.*", strength=1e-7).problem()
    )
    with pytest.raises(ValueError, match="no trained parameter matches"):
        prove(pair, records, tmp_path / "other", match="*.experts.*")

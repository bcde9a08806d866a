"""Both engines of a job with an adapter, in lock-step: the base stands still, the mismatch too."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from syncline.contract.adapters import is_adapter
from syncline.contract.job import JobSpec
from syncline.contract.version_path import VersionManifest
from syncline.lab.measure import gap
from syncline.lab.pair import Pair, one_thread

MODELS = Path(__file__).parents[2] / "examples" / "models"
UPDATES = 6
MATCHED = 1e-5  # measured 1.7e-7: the trainer scoring as rollout multiplies the same values


@pytest.fixture(scope="module", autouse=True)
def _threads() -> None:
    one_thread()


def spec_of(recipe: str, model: str, **parts: Any) -> JobSpec:
    base: dict[str, Any] = {
        "name": "t",
        "model": {"name": model},
        "precision": {"recipe": recipe},
        "task": {"options": {"game": "kind", "length": 4, "alphabet": "ab12"}},
        "sampling": {"max_tokens": 6, "min_tokens": 6},
        "batch": {"groups": 4, "group_size": 4},
        "optimizer": {"lr": 2e-3},
        "schedule": {"in_flight": "drain"},
        "seeds": {"model": 4},
    }
    return JobSpec.model_validate_json(json.dumps(base | parts))


def base_of(manifest: VersionManifest) -> dict[str, str]:
    return {t.name: t.digest for t in manifest.tensors if not is_adapter(t.name)}


def adapter_of(manifest: VersionManifest) -> dict[str, str]:
    return {t.name: t.digest for t in manifest.tensors if is_adapter(t.name)}


@pytest.mark.parametrize(("recipe", "model"), [("lora_frozen_mxfp4", "tiny-kimi"), ("qwen38", "tiny-hybrid")])
def test_the_mismatch_stays_at_its_baseline_after_every_sync(recipe: str, model: str, tmp_path: Path) -> None:
    """On the same tokens throughout. A version that rollout does not have yet is told from it at once."""
    pair = Pair(spec_of(recipe, model), MODELS, tmp_path)
    first = pair.publish()
    fixed = pair.sample(range(16), 4)
    baseline = gap(pair.score_trainer(fixed), pair.score_rollout(fixed)).mean
    assert 1e-2 < baseline < 0.3
    manifests, unsynced = [first], []
    for update in range(UPDATES):
        records = pair.sample(range(4 * update, 4 * update + 4), 4)
        assert not pair.train(records, pair.rewards(records)).result.skipped
        unsynced.append(gap(pair.score_trainer(fixed, as_rollout=True), pair.score_rollout(fixed)).mean)
        manifests.append(pair.publish())
        mismatch = gap(pair.score_trainer(fixed), pair.score_rollout(fixed)).mean
        assert 0.8 * baseline < mismatch < 1.25 * baseline
        matched = gap(pair.score_trainer(fixed, as_rollout=True), pair.score_rollout(fixed))
        assert matched.mean < MATCHED
        assert pair.record is not None
        assert pair.record.new_bytes == sum(
            t.nbytes for t in manifests[-1].tensors if is_adapter(t.name)
        ) - _kept(manifests)
    assert min(unsynced) > 100 * MATCHED
    assert all(base_of(m) == base_of(first) for m in manifests)
    adapters = [adapter_of(m) for m in manifests]
    assert all(a != b for a, b in pairwise(adapters))


def _kept(manifests: list[VersionManifest]) -> int:
    """Bytes of adapter tensors that the last update left as they were."""
    before, after = (adapter_of(m) for m in manifests[-2:])
    return sum(
        t.nbytes for t in manifests[-1].tensors if is_adapter(t.name) and before[t.name] == after[t.name]
    )

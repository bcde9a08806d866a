"""Climbs of the tests: a recipe on a tiny model of its family, from a seed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from syncline.contract.job import JobSpec
from syncline.lab.ladder.climb import LEVELS, climb
from syncline.lab.ladder.records import Level, Report
from syncline.lab.pair import one_thread

MODELS = Path(__file__).parents[2] / "examples" / "models"
RECIPES = (
    ("bf16", "tiny-dense"),
    ("bf16", "tiny-moe"),
    ("unified_fp8", "tiny-dense"),
    ("unified_fp8", "tiny-moe"),
    ("glm52", "tiny-glm"),
    ("int4_qat_w4a16", "tiny-moe"),
    ("mxfp4_qat_w4a16", "tiny-moe"),
    ("mxfp8", "tiny-moe"),
    ("nvfp4_w4a4", "tiny-moe"),
    ("nvfp4_selective", "tiny-moe"),
    ("lora_frozen_mxfp4", "tiny-kimi"),
    ("qwen38", "tiny-hybrid"),
)


def spec_of(recipe: str, model: str, seed: int = 0) -> JobSpec:
    """A job that holds `recipe` on `model`."""
    spec: dict[str, Any] = {
        "name": "ladder",
        "model": {"name": model},
        "precision": {"recipe": recipe},
        "task": {"options": {"game": "kind", "length": 4, "alphabet": "ab12"}},
        "schedule": {"in_flight": "drain", "mode": "colocated", "max_lag": 0},
        "seeds": {"model": seed, "data": seed, "sampling": seed},
    }
    return JobSpec.model_validate_json(json.dumps(spec))


def climbed(spec: JobSpec, levels: tuple[Level, ...] = tuple(LEVELS)) -> Report:
    """The climb of `spec` in a folder that is gone afterwards."""
    one_thread()
    with tempfile.TemporaryDirectory(prefix="syncline-ladder-") as folder:
        return climb(spec, MODELS, Path(folder), levels)


def story(report: Report) -> str:
    """What failed, for the message of a test."""
    return "; ".join(
        f"level {result.level}: {result.broke or [(c.name, c.found, c.bound, c.where) for c in result.failed]}"
        for result in report.results
        if not result.holds
    )

"""Whether the SGLang server that a spec asks for can hold its model, from the model's config.json: before it runs."""

from __future__ import annotations

import json
from pathlib import Path

from syncline.contract import sglang_rules
from syncline.contract.job import JobSpec, Problem
from syncline.contract.job_rules import contract_key
from syncline.gateway import model_root


def problems(root: Path, spec: JobSpec) -> list[Problem]:
    """What the server refuses of this model. What else a config says, it judges at its start."""
    if spec.rollout.engine != "sglang" or model_root.problems(root, spec.model):
        return []
    try:
        config = json.loads((root / spec.model.name / "config.json").read_bytes())
        told = list(sglang_rules.fits(spec.contract(), config, spec.device.hardware == "cpu"))
    except (OSError, ValueError):
        return []  # who loads the model says what is wrong with it
    return [
        Problem(
            path=found.path if found.path == "model.name" else contract_key(spec, found.path),
            message=found.message,
            hint=found.hint,
        )
        for found in told
    ]

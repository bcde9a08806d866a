"""Whether the trainer that a spec names can hold its model, from the model's config.json: before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

from syncline.contract.job import JobSpec, Problem
from syncline.contract.sharding.grid import BadLayout
from syncline.contract.sharding.layout import dimensions
from syncline.contract.trainer_rules import MEGATRON_MODELS, grid_of, layout_of, topology_refusals
from syncline.gateway import model_root


def problems(root: Path, spec: JobSpec) -> list[Problem]:
    """Families and topologies that the Megatron engine refuses. What else a config says, it judges at its start."""
    if spec.trainer.engine != "megatron" or model_root.problems(root, spec.model):
        return []
    try:
        config = json.loads((root / spec.model.name / "config.json").read_bytes())
    except (OSError, ValueError):
        return []  # who loads the model says what is wrong with it
    kind = config.get("model_type")
    if kind not in MEGATRON_MODELS:
        message = f"'megatron' builds no model of type {kind!r}, as {spec.model.name!r} is"
        hint = f"use 'torch', or a model of {', '.join(MEGATRON_MODELS)}"
        return [Problem(path="trainer.engine", message=message, hint=hint)]
    try:
        dims = dimensions(config)
        grid = grid_of(spec.trainer.parallel)
        layout_of(grid, dims)
    except BadLayout as error:
        return [Problem(path="trainer.parallel", message=str(error), hint="sizes that divide the model's")]
    return [
        Problem(path="trainer.parallel", message=why, hint="docs/megatron.md lists what is refused, and why")
        for why in topology_refusals(grid, dims, gloo=spec.device.hardware == "cpu")
    ]

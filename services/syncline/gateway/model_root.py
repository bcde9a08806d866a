"""The model root: which models there are. A name never leads out of it, symlinks included."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from syncline.contract.job import ModelSpec, Problem, SamplingSpec


def models(root: Path) -> list[str]:
    """Names of the folders with a config.json whose real path lies under the real root, sorted."""
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in root.iterdir() if _there(root, entry.name))


def problems(root: Path, model: ModelSpec) -> list[Problem]:
    """What keeps `model` from being used. Empty: nothing."""
    if not _there(root, model.name):
        there = models(root)
        near = difflib.get_close_matches(model.name, there, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        listed = f"there are: {', '.join(there)}" if there else "there are none"
        return [Problem(path="model.name", message=f"there is no model {model.name!r}", hint=guess + listed)]
    if model.weights == "pretrained" and not any((root / model.name).glob("*.safetensors")):
        return [
            Problem(
                path="model.weights",
                message=f"model {model.name!r} has no safetensors",
                hint="use 'random', or put the weights into its folder",
            )
        ]
    return []


def length_problems(root: Path, model: ModelSpec, sampling: SamplingSpec) -> list[Problem]:
    """What keeps `model` from sampling as long as asked. A config that states no positions is the engine's to judge."""
    if not _there(root, model.name):
        return []
    try:
        config = json.loads((root / model.name / "config.json").read_bytes())
    except ValueError as error:
        return [Problem(path="model.name", message=f"config.json of {model.name!r} is not JSON: {error}")]
    positions = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if not isinstance(positions, int) or sampling.max_tokens < positions:
        return []
    message = f"{sampling.max_tokens} does not fit into the {positions} positions of model {model.name!r}"
    return [Problem(path="sampling.max_tokens", message=message, hint="prompt and response share them")]


def inside(root: Path, path: Path) -> bool:
    """Whether `path` is a file that really lies under `root`, however many links lead to it."""
    return path.is_file() and path.resolve().is_relative_to(root.resolve())


def _there(root: Path, name: str) -> bool:
    return inside(root, root / name / "config.json")

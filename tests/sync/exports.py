"""Exports as a trainer writes them, for the sync tests. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize_file

from syncline.contract.recipes import RECIPES
from syncline.contract.version_path import Canary, Minted, VersionId

CONFIG: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": False}
CANARY = Canary(tokens=(1, 2, 3), prompt=1, logprobs=(-1.0, -2.0))
_NAMES = {"<f4": "float32", "<f2": "float16", "<i8": "int64", "|u1": "uint8", "<f8": "float64", "|b1": "bool"}


def write(
    folder: Path,
    parts: dict[str, np.ndarray[Any, Any] | tuple[str, np.ndarray[Any, Any]]],
    config: dict[str, Any] = CONFIG,
) -> dict[str, str]:
    """Write `model.safetensors` and `config.json`; the stamped digests. BF16: `("bfloat16", u2 bits)`."""
    folder.mkdir(parents=True, exist_ok=True)
    specs = {}
    for name, part in parts.items():
        dtype, data = part if isinstance(part, tuple) else (_NAMES[part.dtype.str], part)
        data = np.ascontiguousarray(data).reshape(data.shape)
        specs[name] = TensorSpec(
            dtype=dtype, shape=list(data.shape), data_ptr=data.ctypes.data, data_len=data.nbytes
        )
        parts[name] = (dtype, data)  # keeps the memory alive until it is written
    serialize_file(specs, str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def weights(seed: int, rows: int = 8) -> dict[str, np.ndarray[Any, Any] | tuple[str, np.ndarray[Any, Any]]]:
    """A small, finite set of FP32 tensors."""
    rng = np.random.default_rng(seed)
    return {
        "model.embed_tokens.weight": rng.standard_normal((rows, 4)).astype("<f4"),
        "model.layers.0.mlp.weight": rng.standard_normal((4, 4)).astype("<f4"),
        "lm_head.weight": rng.standard_normal((rows, 4)).astype("<f4"),
    }


def minted(job: str, run: Path, version: VersionId, seed: int, parent: VersionId | None = None) -> Minted:
    """Export `weights(seed)` below the run folder and stamp it, as a trainer does."""
    artefact = f"export/{version}"
    files = write(run / artefact, weights(seed))
    return Minted(
        job=job,
        version=version,
        parent=parent,
        optimizer_step=version.number,
        contract=RECIPES["bf16"].digest(),
        artefact=artefact,
        files=files,
        canaries=(CANARY,),
        traceparent=f"00-{version.number + 1:032x}-{1:016x}-01",
        minted_at=1.0,
    )

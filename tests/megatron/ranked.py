"""Engines on several ranks, and what they export and save as the full tensors of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from conformance.trainer_engine import spec_of
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from syncline.contract.sharding.grid import Grid
from syncline.contract.sharding.pieces import Sharding
from syncline.sync.export import Export
from syncline.sync.source import source_of
from syncline.trainer.engine import TrainerEngine
from syncline.trainer.engines.megatron import ranks
from syncline.trainer.engines.megatron.checkpoint import Files
from syncline.trainer.engines.megatron.load import gather
from syncline.trainer.engines.torch import TorchEngine

TOPOLOGIES: dict[str, dict[str, int]] = {
    "tp1": {},
    "tp2": {"tp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "tp2ep2": {"tp": 2, "ep": 2},
}
FP32: dict[str, Any] = {"precision": {"recipe": "fp32"}}
KINDS = {"BF16": torch.bfloat16, "F32": torch.float32}


def spec(parallel: dict[str, Any], model: str = "tiny-moe", **parts: Any) -> Any:
    """A job of the engine under test on these ranks."""
    trainer = {
        "engine": "megatron",
        "parallel": {"deadline": 60.0, **parallel},
        **parts.pop("trainer", {}),
    }
    return spec_of(model, trainer=trainer, **parts)


def end_followers() -> None:
    """End the ranks of this process's group."""
    while ranks._current:
        ranks._current.pop().close()


def exported(engine: TrainerEngine, folder: Path, base: bool = True) -> dict[str, Tensor]:
    """Full tensors of an export, sharded ones gathered by sync."""
    return gathered(engine.export(folder, base), folder, base)


def gathered(files: dict[str, str], folder: Path, base: bool = True) -> dict[str, Tensor]:
    """Full tensors of the export in `folder`."""
    if "shards.json" not in files:
        return load_file(folder / ("model.safetensors" if base else "adapter.safetensors"))
    source = source_of(Export(folder, files), spec_of().contract())
    out = {}
    for name in source.facts():
        raw = source.read(name)
        flat = torch.from_numpy(np.array(raw.data)).view(KINDS[raw.dtype])
        out[name] = flat.reshape(raw.shape)
    return out


def same_bytes(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def saved(folder: Path, field: str) -> dict[str, Tensor]:
    """`field` of the optimizer, as full tensors, in a checkpoint of any ranks."""
    files = Files(folder)
    names = files.saved.trained
    shapes = {name: files.saved.shapes[name] for name in names}
    lone = Sharding(replace(files.saved.layout, grid=Grid()), shapes)
    shards = {shard.name: shard for shard in lone.on(0)}
    held = {name: files.shard(field, shard, torch.empty(0)) for name, shard in shards.items()}
    return dict(gather(shapes, [(shards, held)]))


def saved_by_torch(engine: TorchEngine, field: str) -> dict[str, Tensor]:
    """The same of a torch engine, which holds it under its own parameters."""
    live = engine._need()
    windows = live.loaded.plan.windows if live.base is None else live.base.adapters.state.windows
    state = {name: live.optimizer.state[master] for name, master in live.masters.items()}
    return {
        name: state[w.owner][field].as_strided(w.shape, w.stride, w.offset) for name, w in windows.items()
    }

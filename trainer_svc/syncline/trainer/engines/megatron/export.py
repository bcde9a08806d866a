"""Weights to disk: whole from a lone rank, as stamped shards from several."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from syncline.contract.adapters import is_adapter
from syncline.contract.precision import PrecisionContract
from syncline.contract.sharding.grid import Rank
from syncline.runtime.durable import sync_file, sync_folder
from syncline.runtime.export_files import write_rank
from syncline.trainer.engines.megatron.awake import Awake
from syncline.trainer.engines.megatron.base import anywhere
from syncline.trainer.engines.megatron.load import gather
from syncline.trainer.engines.megatron.wire import Answer


def write(awake: Awake, rank: Rank, folder: Path, contract: PrecisionContract, base: bool) -> Answer:
    """This rank's share of an export into `folder`. Nothing is written if a master on any rank is not finite.

    A lone rank writes `model.safetensors` and `config.json`; of several, each writes the file of its shards, unless it
    holds nothing but replicas of lower ranks. Without `base` they hold the adapter alone, and a lone rank's file is
    `adapter.safetensors`. Raises `BaseMoved`.
    """
    awake.agree_on_base()
    broken = tuple(sorted(awake.masters.broken()))
    if anywhere(bool(broken)):
        return Answer(bad=broken)
    narrow = contract.trainer.parameters == "bf16"
    dtype = torch.bfloat16 if narrow else torch.float32
    if awake.layout.grid.size == 1:
        return Answer(files=_whole(awake, folder, dtype, base))
    shards = {n: s for n, s in awake.part.shards.items() if base or is_adapter(s.like)}
    if all(awake.replicas.ranks[name][0] != rank.index for name in shards):
        return Answer()
    named = "BF16" if narrow else "F32"
    facts = {name: (named, shard.shape) for name, shard in shards.items()}
    buffers = ((name, raw(awake.part.tensors[name].to(dtype))) for name in shards)
    return Answer(export=write_rank(folder, awake.layout, rank.index, facts, buffers))


def _whole(awake: Awake, folder: Path, dtype: torch.dtype, base: bool) -> dict[str, str]:
    folder.mkdir(parents=True)
    shapes = {name: shape for name, shape in awake.shapes.items() if base or is_adapter(name)}
    shards = {n: s for n, s in awake.part.shards.items() if base or is_adapter(s.like)}
    held = {name: awake.part.tensors[name].to(dtype).cpu() for name in shards}
    full = dict(gather(shapes, [(shards, held)]))
    written = "model.safetensors" if base else "adapter.safetensors"
    save_file(full, folder / written, metadata={"format": "pt"})
    (folder / "config.json").write_bytes(awake.config_bytes())
    files = {name: sync_file(folder / name) for name in (written, "config.json")}
    sync_folder(folder)
    sync_folder(folder.parent)
    return files


def raw(tensor: Tensor) -> memoryview:
    """The bytes of `tensor` in C order."""
    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data

"""Weights to disk: whole from a lone rank, as stamped shards from several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from syncline.contract.precision import PrecisionContract
from syncline.contract.sharding.grid import Rank
from syncline.runtime.durable import sync_file, sync_folder
from syncline.runtime.export_files import write_rank
from syncline.trainer.engines.megatron.awake import Awake
from syncline.trainer.engines.megatron.load import gather
from syncline.trainer.engines.megatron.wire import Answer


def write(awake: Awake, rank: Rank, folder: Path, contract: PrecisionContract, base: bool) -> Answer:
    """This rank's share of an export into `folder`. Nothing is written if a master on any rank is not finite.

    A lone rank writes `model.safetensors` and `config.json`; of several, each writes the file of its shards, unless it
    holds nothing but replicas of lower ranks.
    """
    broken = tuple(sorted(awake.masters.broken()))
    if _anywhere(bool(broken)):
        return Answer(bad=broken)
    narrow = contract.trainer.parameters == "bf16"
    dtype = torch.bfloat16 if narrow else torch.float32
    if awake.layout.grid.size == 1:
        return Answer(files=_whole(awake, folder, dtype))
    if all(awake.replicas.ranks[name][0] != rank.index for name in awake.part.shards):
        return Answer()
    named = "BF16" if narrow else "F32"
    facts = {name: (named, shard.shape) for name, shard in awake.part.shards.items()}
    return Answer(export=write_rank(folder, awake.layout, rank.index, facts, _buffers(awake, dtype)))


def _whole(awake: Awake, folder: Path, dtype: torch.dtype) -> dict[str, str]:
    folder.mkdir(parents=True)
    held = {name: t.to(dtype).cpu() for name, t in awake.part.tensors.items()}
    full = dict(gather(awake.shapes, [(awake.part.shards, held)]))
    save_file(full, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes(awake.config_bytes())
    files = {name: sync_file(folder / name) for name in ("model.safetensors", "config.json")}
    sync_folder(folder)
    sync_folder(folder.parent)
    return files


def _buffers(awake: Awake, dtype: torch.dtype) -> Iterator[tuple[str, memoryview]]:
    for name, tensor in awake.part.tensors.items():
        yield name, raw(tensor.to(dtype))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of `tensor` in C order."""
    data: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def _anywhere(here: bool) -> bool:
    if dist.get_world_size() == 1:
        return here
    flag = torch.tensor(int(here))
    if torch.cuda.is_available():
        flag = flag.cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)

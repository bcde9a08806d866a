"""Faults of what a trainer's ranks hand over, each in a file of its own, before sync gathers them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import torch
from fault_exports import FILE, flip
from fault_stack import Damage, Stack
from safetensors.torch import load_file, save_file
from shard_exports import write_shards

from syncline.contract.exports import rank_file
from syncline.contract.sharding.grid import Grid
from syncline.contract.sharding.layout import Layout, dimensions

Injection = Callable[[Stack], AbstractContextManager[None]]
Q = "model.layers.0.self_attn.q_proj.weight"


def cut(folder: Path) -> None:
    """The export of a trainer of two ranks in the place of a whole one."""
    raw = (folder / "config.json").read_bytes()
    config = json.loads(raw)
    full = {
        name: tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        for name, tensor in load_file(folder / FILE).items()
    }
    for path in list(folder.iterdir()):
        path.unlink()
    layout = Layout(engine="megatron_local", grid=Grid(tp=2), model=dimensions(config))
    write_shards(folder, full, layout, "BF16", config=config)
    (folder / "config.json").write_bytes(raw)  # its digest is the model's


def sharded(damage: Damage = lambda folder: None, late: Damage | None = None) -> Injection:
    """`damage` after the ranks stamped their shards and before the files are; `late`: after that."""

    def both(folder: Path) -> None:
        cut(folder)
        damage(folder)

    @contextmanager
    def inject(stack: Stack) -> Iterator[None]:
        stack.mint(damage=both, late=late)
        yield

    return inject


def _exchange_files(folder: Path) -> None:
    one, other = folder / rank_file(0), folder / rank_file(1)
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


def _exchange_shards(folder: Path) -> None:
    """One parameter of each rank in the other's file: equal names, dtypes and shapes."""
    held = [load_file(folder / rank_file(rank)) for rank in range(2)]
    name = next(n for n in held[0] if n.endswith("linear_proj.weight"))
    held[0][name], held[1][name] = held[1][name].clone(), held[0][name].clone()
    for rank in range(2):
        save_file(held[rank], folder / rank_file(rank))


whole = sharded()
files_exchanged = sharded(_exchange_files)
shards_exchanged = sharded(_exchange_shards)
rank_gone = sharded(lambda folder: (folder / rank_file(1)).unlink())
shard_flipped = sharded(lambda folder: flip(folder / rank_file(1)))
file_flipped = sharded(late=lambda folder: flip(folder / rank_file(1)))

"""Masters, optimizer and buffers of all ranks on disk, and back under any layout of the same model.

Each rank writes what it owns into a file of its own, under the names that it has on the rank; `layout.json` says what
those are pieces of, so that ranks cut in another way find their values. safetensors and JSON alone: megatron-core's own
distributed checkpoints hold pickles, which nothing here may read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from syncline.contract.exports import rank_file as rank_state
from syncline.contract.sharding.cuts import Piece
from syncline.contract.sharding.grid import Rank
from syncline.contract.sharding.layout import Layout
from syncline.contract.sharding.pieces import Shard, Sharding
from syncline.runtime.durable import sync_file
from syncline.trainer.engines.megatron.awake import Awake
from syncline.trainer.engines.megatron.load import region

LAYOUT = "layout.json"


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the ranks that saved were laid out, and the full tensors' shapes.

    fields   of the optimizer
    base     digest of the frozen base under an adapter, which is not saved; "": there is none
    """

    layout: Layout
    shapes: dict[str, tuple[int, ...]]
    trained: tuple[str, ...]
    fields: tuple[str, ...]
    base: str = ""


def write(awake: Awake, rank: Rank, folder: Path, durable: bool) -> None:
    """This rank's file into the existing `folder`, and `layout.json` from rank 0. `durable`: fsynced.

    Of a frozen base its digest alone. Raises `BaseMoved`.
    """
    awake.agree_on_base()
    base = "" if awake.base is None else awake.base.whole
    tensors = {f"parameter.{name}": p.detach() for name, p in awake.masters.owned.items()}
    tensors |= awake.masters.state()
    for name, tensor in awake.fixed().items():
        if awake.replicas.ranks[name][0] == rank.index:
            tensors[f"buffer.{name}"] = tensor
    if rank.index == 0:
        tensors["rng.cpu"] = torch.get_rng_state()
    names = [rank_state(rank.index)]
    save_file({k: t.cpu().contiguous() for k, t in tensors.items()}, folder / names[0])
    if rank.index == 0:
        saved = Saved(awake.layout, awake.shapes, tuple(sorted(awake.trained)), awake.masters.fields(), base)
        (folder / LAYOUT).write_bytes(msgspec.json.encode(saved))
        names.append(LAYOUT)
    for name in names if durable else ():
        sync_file(folder / name)
    if dist.get_world_size() > 1:
        dist.barrier()  # a checkpoint is whole when any rank says so


def read(awake: Awake, rank: Rank, folder: Path) -> None:
    """Inverse of `write`, under this rank's own layout. Raises `ValueError` naming file and tensor, before
    any change.
    """
    files = Files(folder)
    files.refuse_other(awake)
    values: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, master in awake.masters.owned.items():
        shard = awake.part.shards[name]
        values[name] = files.shard("parameter", shard, master)
        for field in files.saved.fields:
            moments.setdefault(name, {})[field] = files.shard(field, shard, master)
    fixed = {name: files.shard("buffer", awake.part.shards[name], t) for name, t in awake.fixed().items()}
    rng = files.rng() if rank.index == 0 else None
    with torch.no_grad():
        for name, value in values.items():
            awake.masters.owned[name].copy_(value)
        for name, tensor in awake.fixed().items():
            tensor.copy_(fixed[name])
    awake.masters.restore(moments)
    if rng is not None:
        torch.set_rng_state(rng)
    awake.masters.send()


class Files:
    """A saved folder. Raises `ValueError` naming the file that is missing or broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self.saved = msgspec.json.decode((folder / LAYOUT).read_bytes(), type=Saved)
        except OSError as error:
            raise ValueError(
                f"{folder}: no {LAYOUT} beside rank files (.safetensors): {error.strerror}"
            ) from None
        except msgspec.MsgspecError as error:
            raise ValueError(f"{folder / LAYOUT}: {error}") from None
        self._sharding = Sharding(self.saved.layout, self.saved.shapes)
        self._where: dict[str, list[tuple[Piece, int, str]]] = {}
        self._open: dict[int, Any] = {}
        for place in self.saved.layout.grid.ranks():
            path = folder / rank_state(place.index)
            try:
                self._open[place.index] = safe_open(path, "pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: {error}") from None
            for shard in self._sharding.on(place.index):
                for piece in shard.pieces:
                    self._where.setdefault(piece.source, []).append((piece, place.index, shard.name))
        self._keys = {index: set(file.keys()) for index, file in self._open.items()}

    def refuse_other(self, awake: Awake) -> None:
        """Raise `ValueError` naming a tensor of another model."""
        ours, theirs = awake.shapes, self.saved.shapes
        path = self._folder / rank_state(0)
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs:
                raise ValueError(
                    f"{path}: tensor parameter.{name} is {'missing' if name in ours else 'unexpected'}"
                )
            if ours[name] != theirs[name]:
                raise ValueError(
                    f"{path}: tensor parameter.{name} has shape {list(theirs[name])}, the model {list(ours[name])}"
                )
        if (mine := tuple(sorted(awake.trained))) != self.saved.trained:
            other = sorted(set(mine) ^ set(self.saved.trained))[0]
            raise ValueError(f"{path}: tensor parameter.{other} is trained on one side alone")

        mine_base = "" if awake.base is None else awake.base.whole
        if mine_base != self.saved.base:
            raise ValueError(
                f"{path}: it belongs to the frozen base {self.saved.base or '(none)'}, the model's is "
                f"{mine_base or '(none)'}"
            )

    def shard(self, kind: str, shard: Shard, like: Tensor) -> Tensor:
        """`kind` of `shard`, put together from whoever held its pieces. A scalar is the same for all of them."""
        out = torch.zeros(shard.shape, dtype=torch.float32)
        for piece in shard.pieces:
            if not piece.source:
                continue
            for held, index, name in self._where[piece.source]:
                first, last = max(piece.start, held.start), min(piece.stop, held.stop)
                if first >= last or f"{kind}.{name}" not in self._keys[index]:
                    continue
                tensor: Tensor = self._open[index].get_tensor(f"{kind}.{name}")
                if tensor.dim() == 0:
                    return tensor
                source = region(tensor, held).narrow(piece.axis, first - held.start, last - first)
                region(out, piece).narrow(piece.axis, first - piece.start, last - first).copy_(source)
        self._check_whole(kind, shard)
        return out.to(like.device)

    def _check_whole(self, kind: str, shard: Shard) -> None:
        for piece in shard.pieces:
            at = piece.start
            held = sorted(
                (h.start, h.stop)
                for h, index, name in self._where.get(piece.source, [])
                if piece.source and f"{kind}.{name}" in self._keys[index]
            )
            for start, stop in held:
                at = max(at, stop) if start <= at else at
            if piece.source and at < piece.stop:
                raise ValueError(f"{self._folder}: tensor {kind}.{piece.source} is missing from {at} on")

    def rng(self) -> Tensor:
        """Random state of rank 0."""
        if "rng.cpu" not in self._keys[0]:
            raise ValueError(f"{self._folder / rank_state(0)}: tensor rng.cpu is missing")
        state: Tensor = self._open[0].get_tensor("rng.cpu")
        return state

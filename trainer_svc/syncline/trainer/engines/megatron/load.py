"""Full tensors into a rank's parameters and back, as the pieces of `contract/sharding` say. No table of names here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from syncline.contract.sharding.cuts import Piece
from syncline.contract.sharding.pieces import Shard, Sharding


class WrongModel(RuntimeError):
    """megatron-core built another set of parameters than the layout names. The message names the first."""


class LoadedPart:
    """What one rank holds of a model: its shards, each with the live tensor (parameter or buffer)."""

    def __init__(self, model: nn.Module, sharding: Sharding, rank: int) -> None:
        sharding.check()
        self.sharding = sharding
        self.shards: dict[str, Shard] = {shard.name: shard for shard in sharding.on(rank)}
        self.tensors = _live(model)
        for name in sorted(self.tensors.keys() | self.shards.keys()):
            if name not in self.shards or name not in self.tensors:
                where = "layout does not name" if name in self.tensors else "model lacks"
                raise WrongModel(f"parameter {name} on rank {rank}: the {where} it")
            if tuple(self.tensors[name].shape) != self.shards[name].shape:
                raise WrongModel(
                    f"parameter {name} on rank {rank} has shape {list(self.tensors[name].shape)}, the layout says "
                    f"{list(self.shards[name].shape)}"
                )

    @torch.no_grad()
    def fill(self, full: Mapping[str, Tensor]) -> None:
        """Copy this rank's pieces of the full tensors in; padding rows become zero."""
        for name, shard in self.shards.items():
            target = self.tensors[name]
            for piece in shard.pieces:
                place = region(target, piece)
                if not piece.source:
                    place.zero_()
                elif not piece.same:
                    place.copy_(full[piece.source].narrow(piece.axis, piece.start, piece.stop - piece.start))


def gather(
    shapes: Mapping[str, tuple[int, ...]], parts: Sequence[tuple[Mapping[str, Shard], Mapping[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors by sorted name from the shards of every rank, as they are: no value is converted."""
    found: dict[str, list[tuple[Piece, Tensor]]] = {name: [] for name in shapes}
    for shards, tensors in parts:
        for name, shard in shards.items():
            for piece in shard.pieces:
                if piece.source:
                    found[piece.source].append((piece, tensors[name]))
    for name in sorted(shapes):
        if not found[name]:
            raise WrongModel(f"tensor {name} is on no rank")
        out = torch.empty(shapes[name], dtype=found[name][0][1].dtype)
        for piece, held in found[name]:
            place = out.narrow(piece.axis, piece.start, piece.stop - piece.start)
            place.copy_(region(held, piece))
        yield name, out


def region(held: Tensor, piece: Piece) -> Tensor:
    """The place of `piece` in the shard `held`."""
    return held.narrow(piece.axis, piece.at, piece.stop - piece.start)


def _live(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, detached from the graph but not from memory."""
    names = {name for name, _ in model.named_parameters()} | set(dict(model.named_buffers()))
    kept = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    return {name: t.detach() for name, t in kept.items() if name in names}

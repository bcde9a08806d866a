"""The checksums that a server must read back with: its own fused parameters, made here from the manifest's tensors.

The server hashes each parameter as it holds it (`/weights_checker`): q, k and v in one matrix, experts stacked, a
vocabulary padded with zeros. A tensor that it skipped, cut wrongly or put elsewhere leaves a parameter with other
bytes. What lies where is `contract/sharding`; a block-quantised FP8 weight is hashed as its BF16 values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from syncline.contract.plan import PrecisionPlan
from syncline.contract.sharding.grid import Grid
from syncline.contract.sharding.layout import Layout, dimensions
from syncline.contract.sharding.pieces import Shard, Sharding
from syncline.rollout.engines.sglang.client import ranked
from syncline.rollout.engines.sglang.hashes import checksum

_SCALE = "_scale_inv"


class FusedModel:
    """The server's parameters, for a model with this config.json.

    shapes   checkpoint name -> shape of the full wide tensors, adapters' not included
    wide     dtype of the server's wide parameters
    tp       ranks that the model is cut over
    hashed   the server's hash, of CPU or CUDA tensors
    Raises `BadLayout` (a `ValueError`) naming a tensor that SGLang has no place for.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        plan: PrecisionPlan,
        wide: torch.dtype,
        tp: int = 1,
        hashed: Callable[[Tensor], str] = checksum,
    ) -> None:
        self._hashed = hashed
        self._ranks = tp
        layout = Layout(engine="sglang", grid=Grid(tp=tp, etp=tp), model=dimensions(config))
        self._sharding = Sharding(layout, shapes, plan)
        self._sharding.check()
        self._wide = wide
        self._block = {
            name
            for entry in plan.low_bit()
            if entry.weight is not None and entry.weight.format == "fp8_block"
            for name in (entry.name,)
        }

    def checksums(self, read: Callable[[str], Tensor]) -> dict[str, str]:
        """Parameter (`ranked` where there are ranks) -> checksum, for checkpoint tensors that `read` gives by name."""
        if self._ranks == 1:
            return self._on(0, read)
        return {
            ranked(name, rank): made
            for rank in range(self._ranks)
            for name, made in self._on(rank, read).items()
        }

    def _on(self, rank: int, read: Callable[[str], Tensor]) -> dict[str, str]:
        shards = {shard.name: shard for shard in self._sharding.on(rank)}
        out: dict[str, str] = {}
        for name, shard in shards.items():
            if name.endswith(_SCALE) and self._hashed_with(shards[name.removesuffix(_SCALE)]):
                continue
            made = self._made(shard, read)
            if self._hashed_with(shard):
                made = block_values(made, self._made(shards[name + _SCALE], read))
            out[name] = self._hashed(made)
        return out

    def _hashed_with(self, shard: Shard) -> bool:
        """Whether `shard` is codes that are hashed together with their scales."""
        return shard.like in self._block

    def _made(self, shard: Shard, read: Callable[[str], Tensor]) -> Tensor:
        first = read(shard.like)
        dtype = (
            self._wide
            if first.dtype in (torch.bfloat16, torch.float32) and not _scales(shard)
            else first.dtype
        )
        out = torch.zeros(shard.shape, dtype=dtype)
        for piece in shard.pieces:
            if not piece.source:
                continue
            length = piece.stop - piece.start
            place = out if piece.slot is None else out[piece.slot]
            place.narrow(piece.axis, piece.at, length).copy_(
                read(piece.source).narrow(piece.axis, piece.start, length)
            )
        return out


def block_values(codes: Tensor, scales: Tensor) -> Tensor:
    """E4M3 codes [.., N, K] under FP32 scales as BF16 values, in the square blocks that the server infers from K."""
    n, k = codes.shape[-2:]
    block = k // scales.shape[-1]
    wide = scales.repeat_interleave(block, -2)[..., :n, :].repeat_interleave(block, -1)[..., :k]
    return (codes.float() * wide).bfloat16()


def _scales(shard: Shard) -> bool:
    return shard.name.endswith(_SCALE)

"""LoRA on Megatron's linear layers, which has none of its own: y = base(x) + scale * (x A^T) B^T, base frozen.

Where A and B lie is said by `contract/sharding` alone: as the weight's rows are cut, B's are, and A is whole; as its
columns are, A's are, and B is whole. What travels between ranks is the product with A, `rank` wide. An A or B that
several ranks hold has a part of its gradient on each of them, which `held.Masters` adds up.

Legend: S positions on this rank, B rows, K inputs, N outputs of the layer on this rank, R the adapter's rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.contract.adapters import DOWN, UP, is_adapter
from syncline.contract.precision import Adapter
from syncline.contract.sharding.pieces import Shard
from syncline.trainer.engines.megatron.library import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class CannotAdapt(ValueError):
    """A target that can have no adapter in this model. The message names it."""


@dataclass(frozen=True)
class _Added:
    """An adapter on one checkpoint tensor of a layer. `rows_N`: where its outputs lie among the layer's."""

    module: nn.Module
    rows_N: Tensor


class Lora:
    """The adapters of one rank's model. `parameters`: all that trains, by name in the model."""

    def __init__(self, model: nn.Module, adapter: Adapter, shards: Mapping[str, Shard]) -> None:
        """Add them to `model`, whose parameters are `shards` without the adapters'. Freezes everything else.

        Values are undefined. Raises `CannotAdapt` naming a target that lies in no linear layer.
        """
        model.requires_grad_(False)
        self.scale = adapter.scale()
        self._on = True
        mine = {name: shard for name, shard in shards.items() if is_adapter(name)}
        added: dict[str, list[_Added]] = {}
        for name, down in mine.items():
            if name.endswith(f".{DOWN}.weight"):
                path = name.removesuffix(f".{DOWN}.weight")
                up = mine[f"{path}.{UP}.weight"]
                layer, place = _place(model, path, down)
                added.setdefault(layer, []).append(
                    _add(model, path, place, down, up, shards[f"{layer}.weight"])
                )
        for layer, parts in added.items():
            module: Any = model.get_submodule(layer)
            module.forward = partial(self._forward, module, module.forward, parts)
        self.parameters = {name: model.get_parameter(name) for name in mine}
        embedding: Any = dict(model.named_children()).get("embedding")
        if embedding is not None:
            embedding.register_forward_hook(_with_gradient)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is its base alone: the reference policy of a LoRA job."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    # ---- forwards ---------------------------------------------------------------------------------------
    def _forward(
        self, module: Any, base: Any, parts: Sequence[_Added], x_SBK: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's outputs with the adapters' added.

        Where rows of the weight are cut, every rank sees all positions and adds its own outputs. Where columns are,
        products with A are parts of sums, as the layer's outputs themselves.
        """
        cut_rows = isinstance(module, ColumnParallelLinear)
        meet = (
            gather_from_sequence_parallel_region if cut_rows else reduce_scatter_to_sequence_parallel_region
        )
        y_SBN, bias = base(x_SBK, *args, **kwargs)
        for part in parts if self._on else ():
            low_SBR = F.linear(x_SBK, _weight(part, DOWN))
            if _gathers(module):
                low_SBR = meet(low_SBR, group=module.tp_group)
            y_SBN = self._plus(y_SBN, part, low_SBR)
        return y_SBN, bias

    def _plus(self, y_SBN: Tensor, part: _Added, low_SBR: Tensor) -> Tensor:
        product = self.scale * F.linear(low_SBR, _weight(part, UP))
        if len(part.rows_N) == y_SBN.shape[-1]:
            return y_SBN + product
        return y_SBN.index_add(-1, part.rows_N.to(y_SBN.device), product)


def _gathers(module: Any) -> bool:
    """Whether positions are spread over the ranks around this layer. Experts' tokens come by the dispatcher."""
    return bool(module.sequence_parallel and not module.explicit_expert_comm)


def _weight(part: _Added, leaf: str) -> Tensor:
    return part.module.get_parameter(f"{leaf}.weight")


def _place(model: nn.Module, path: str, down: Shard) -> tuple[str, str]:
    """The layer that `path` names, and the projection in it; "": the layer is one."""
    for layer, projection in ((path, ""), tuple(path.rsplit(".", 1))):
        try:
            module = model.get_submodule(layer)
        except AttributeError:
            continue
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            return layer, projection
    raise CannotAdapt(f"adapter: target of {down.like} lies in {path}, which is no linear layer")


def _add(model: nn.Module, path: str, projection: str, down: Shard, up: Shard, weight: Shard) -> _Added:
    layer = path.removesuffix(f".{projection}") if projection else path
    module: Any = model.get_submodule(layer)
    holder = nn.Module() if projection else module
    for leaf, shard in ((DOWN, down), (UP, up)):
        inner = nn.Module()
        inner.register_parameter(
            "weight", nn.Parameter(torch.empty(shard.shape, device=module.weight.device))
        )
        holder.add_module(leaf, inner)
    if projection:
        module.add_module(projection, holder)
    return _Added(holder, rows_of(weight, down.like.removesuffix(f".{DOWN}.weight") + ".weight"))


def rows_of(weight: Shard, source: str) -> Tensor:
    """Where the outputs of checkpoint tensor `source` lie among those of the layer with `weight`, in its own order."""
    pieces = sorted((p for p in weight.pieces if p.source == source), key=lambda p: p.start)
    if pieces[0].axis:
        return torch.arange(weight.shape[0])
    return torch.cat([torch.arange(p.at, p.at + p.stop - p.start) for p in pieces])


def _with_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A frozen embedding's output begins the graph: pipelines and recomputed layers want one to go back through."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

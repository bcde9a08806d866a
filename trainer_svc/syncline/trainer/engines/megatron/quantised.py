"""The contract's numerics in Megatron's linear layers: fake quantization in training, rollout's GEMM for canaries.

Nothing is quantised here: `numerics.linear` multiplies, as it does for the torch engine. A layer that holds several
checkpoint tensors (q, k and v; gate and up) multiplies each by itself, since that is what was quantised; a tensor that
is cut must be cut between blocks. Products of a row-parallel layer are parts of sums, added up by Megatron as ever.

Legend: T tokens that the layer sees, K inputs, N outputs on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.contract.plan import PlanEntry, PrecisionPlan
from syncline.contract.precision import Gemm, PrecisionContract
from syncline.contract.schemes import BLOCK, Scheme
from syncline.contract.sharding.lowbit import entries_of
from syncline.contract.sharding.pieces import Shard
from syncline.numerics.linear import Weight, grouped_linear
from syncline.numerics.operands import Copies, GemmName, How, Meter
from syncline.numerics.quantized import NotQuantizable
from syncline.reference.low_bit import CannotTrain, how_of
from syncline.reference.trained import rollout_how
from syncline.trainer.engines.megatron.library import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from syncline.trainer.engines.megatron.lora import rows_of
from syncline.trainer.engines.megatron.wire import Ran

_GEMMS: tuple[GemmName, ...] = ("fprop", "dgrad", "wgrad")


@dataclass
class _Held:
    """This rank's part of one checkpoint tensor. `rows_N`: where its outputs lie; None: it is the whole layer's."""

    entry: PlanEntry
    how: How
    rows_N: Tensor | None
    made: tuple[object, Copies] | None = None


@dataclass
class _Mode:
    """What the layers do now. `rollout`: copies made for rollout's GEMM, by tensor; None: training."""

    rollout: dict[str, Copies] | None = None
    unreadable: list[str] = field(default_factory=list)


class Quantised:
    """The low-bit layers of one rank's model. `names`: their parameters; empty: the plan makes nothing low-bit."""

    def __init__(
        self,
        model: nn.Module,
        contract: PrecisionContract,
        plan: PrecisionPlan,
        shards: Mapping[str, Shard],
    ) -> None:
        """Raises `CannotTrain` or `BadLayout` naming a tensor that is in no linear layer, or is cut inside a block."""
        trainer = contract.trainer
        self._wide = (trainer.fprop, trainer.dgrad, trainer.wgrad) == (Gemm(), Gemm(), Gemm())
        self._contract, self._mode = contract, _Mode()
        self._meter, self._rollout_meter = Meter(), Meter()
        self._held: dict[str, _Held] = {}
        low = {entry.name: entry for entry in plan.low_bit()}
        self.names: set[str] = set()
        for shard in shards.values():
            sources = tuple(dict.fromkeys(piece.source for piece in shard.pieces))
            entries = entries_of(sources, low) if low else ()
            if entries:
                self.names.add(shard.name)
                self._swap(model, shard, entries)

    def _swap(self, model: nn.Module, shard: Shard, entries: Sequence[PlanEntry]) -> None:
        module: Any = model.get_submodule(shard.name.rpartition(".")[0])
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            raise CannotTrain(
                f"tensor {entries[0].name} lies in {shard.name} of {type(module).__name__}, which is no linear layer"
            )
        parts = []
        for entry in entries:
            how = how_of(self._contract, entry)
            _check_cut(shard, entry, how)
            rows_N = rows_of(shard, entry.name) if len(entries) > 1 else None
            parts.append(_Held(entry, how, rows_N))
            self._held[entry.name] = parts[-1]
        module._forward_impl = partial(self._layer, module._forward_impl, parts)
        expert, _, layer = shard.name.removesuffix(".weight").rpartition(".")
        if ".local_experts." in expert and layer == "linear_fc2" and entries[0].activation is not None:
            whole: Any = model.get_submodule(expert)
            whole.forward = partial(self._expert, whole.forward)

    @contextmanager
    def as_rollout(self) -> Iterator[None]:
        """Inside, layers multiply as the rollout engine does, over codes of the present weights. Without gradients."""
        self._mode.rollout = {}
        try:
            yield
        finally:
            self._mode.rollout = None
            self._rollout_meter.reset()

    def begin(self) -> None:
        """A step begins: forget what was metered, and what could not be read."""
        self._meter.reset()
        self._mode.unreadable.clear()

    def unreadable(self) -> tuple[str, ...]:
        """Operands of this step that no format can hold, each once."""
        return tuple(sorted(set(self._mode.unreadable)))

    def ran(self) -> tuple[Ran, ...]:
        """What the GEMMs of this step did on this rank."""
        return tuple(
            Ran(which, name, self._held[name].entry.family, ran.operands, ran.kernel, ran.encoded)
            for which in _GEMMS
            for name, rans in sorted(self._meter.seen[which].items())
            for ran in sorted(rans)
        )

    # ---- forwards ---------------------------------------------------------------------------------------
    def _layer(
        self,
        wide: Any,
        parts: Sequence[_Held],
        *,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence_parallel: bool,
        tp_group: Any,
        **rest: Any,
    ) -> Tensor:
        """In place of Megatron's `_forward_impl`, which it is where a training pass is wide."""
        if self._wide and self._mode.rollout is None:
            y: Tensor = wide(
                input=input,
                weight=weight,
                bias=bias,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                **rest,
            )
            return y
        x = gather_from_sequence_parallel_region(input, group=tp_group) if sequence_parallel else input
        x_TK = x.reshape(-1, x.shape[-1])
        products = [self._product(x_TK, weight, part) for part in parts]
        y = products[0]
        if len(products) > 1:
            order = torch.cat([part.rows_N for part in parts if part.rows_N is not None])
            y = torch.cat(products, dim=1)[:, torch.argsort(order).to(x.device)]
        if bias is not None:
            y = y + bias
        return y.view(*x.shape[:-1], y.shape[1])

    def _expert(self, mlp: Any, x_TK: Tensor, probs_T: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Megatron weighs an expert's hidden values by the router's probabilities before they enter fc2, and so before
        they are quantised; rollout quantises them as they are, and weighs what comes out.
        """
        if probs_T is None or (self._wide and self._mode.rollout is None):
            y: tuple[Tensor, Tensor | None] = mlp(x_TK, probs_T)
            return y
        out, bias = mlp(x_TK)
        return out * probs_T.unsqueeze(-1), bias

    def _product(self, x_TK: Tensor, weight: Tensor, part: _Held) -> Tensor:
        w_NK = weight if part.rows_N is None else weight.index_select(0, part.rows_N.to(weight.device))
        if not len(x_TK):  # an expert without a token
            return F.linear(x_TK, w_NK)
        offsets = torch.tensor([len(x_TK)], dtype=torch.int32, device=x_TK.device)
        try:
            how, copies, meter = self._copies(weight, w_NK, part)
            return grouped_linear(
                x_TK, w_NK.unsqueeze(0), offsets, Weight(part.entry.name, how, copies, meter)
            )
        except NotQuantizable as error:
            # other ranks are in the same pass: it goes on to its end, and the step is skipped for what it gives
            self._mode.unreadable.append(str(error))
            return F.linear(x_TK, w_NK) * torch.nan

    def _copies(self, weight: Tensor, w_NK: Tensor, part: _Held) -> tuple[How, Copies, Meter]:
        name, rollout = part.entry.name, self._mode.rollout
        w = w_NK.detach().unsqueeze(0)
        if rollout is not None:
            how = rollout_how(self._contract, part.how)
            if name not in rollout:
                rollout[name] = Copies(w, how, name)
            return how, rollout[name], self._rollout_meter
        now = (weight.data_ptr(), weight._version)
        if part.made is None or part.made[0] != now:
            part.made = (now, Copies(w, part.how, name))
        return part.how, part.made[1], self._meter


def _check_cut(shard: Shard, entry: PlanEntry, how: How) -> None:
    """Raise `CannotTrain` where the shard's part of `entry` begins or ends inside a block of any operand."""
    for axis, size in enumerate(entry.shape):
        step = _block(how, axis)
        mine = [p for p in shard.pieces if p.source == entry.name and p.axis == axis]
        if not mine:
            continue
        low, high = min(p.start for p in mine), max(p.stop for p in mine)
        if low % step or (high % step and high != size):
            raise CannotTrain(
                f"tensor {entry.name}: {shard} holds {'rows' if axis == 0 else 'columns'} {low} to {high} of {size}, "
                f"which cuts a block of {step}; use fewer ranks, or a format with smaller blocks"
            )


def _block(how: How, axis: int) -> int:
    """Values along `axis` of the weight that no cut may divide. DGrad may quantise along rows."""
    if axis:
        return max(_along(scheme) for scheme in (how.weight, how.activation) if scheme is not None)
    steps = [how.weight.rows]
    for kind, scheme in ((how.dgrad.right, how.weight), (how.dgrad.left, how.activation)):
        if kind in ("requantised", "codes") and scheme is not None:
            steps.append(_along(scheme))
    return max(steps)


def _along(scheme: Scheme) -> int:
    return BLOCK[scheme.format] or scheme.columns

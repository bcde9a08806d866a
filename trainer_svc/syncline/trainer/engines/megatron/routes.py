"""Routers of one rank: what they choose freely, and what they are told to choose.

megatron-core asks a router's `router_replay` for its top k (`moe_utils.topk_routing_with_score_function`); `Choice` is
such an object. It always computes the free choice; told ids replace it, with the router's own scores at them, so that
weights and gradients are the present model's. The library's own object keeps a list over all models of the process and
forgets the free choice, which the agreement of routes is counted from.

Legend: B rows, T columns, S columns on this rank (T / tp, sequence parallel), L routing layers of this rank, K experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from syncline.reference.routes import CannotReplay
from syncline.trainer.engine import Sample
from syncline.trainer.engines.forward import fed
from syncline.trainer.engines.megatron.forward import Turn
from syncline.trainer.engines.megatron.library import TopKRouter, is_checkpointing, parallel_state
from syncline.trainer.engines.megatron.wire import Caught


class Choice:
    """One router's choice. `told` [S x B, K] int64, sequence-major; None: it chooses freely.

    A layer that is run again in the backward pass gets the ids that it used before: `again`, oldest pass first, which
    is the order in which every schedule goes back.
    """

    def __init__(self) -> None:
        self.told: Tensor | None = None
        self.free: Tensor | None = None
        self.again: deque[Tensor] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """As `megatron.core...router_replay.RouterReplay.get_replay_topk`."""
        if is_checkpointing() and torch.is_grad_enabled():
            used = self.again.popleft()
            return scores.gather(1, used), used
        values, ids = default_compute_topk(scores, topk, num_groups, group_topk)
        self.free = ids.detach()
        if self.told is not None and self.told.shape != ids.shape:
            raise CannotReplay(
                f"expert ids of shape {list(self.told.shape)} for {list(ids.shape)} of a router"
            )
        used = self.free if self.told is None else self.told
        if is_checkpointing():
            self.again.append(used)
        return (values, ids) if self.told is None else (scores.gather(1, used), used)


class Routers:
    """All routers of one rank's model. `layers`: routing layers of the whole model, `topk`, `experts` of each."""

    def __init__(self, model: nn.Module, sparse: Sequence[int], first_layer: int) -> None:
        self.layers = sum(sparse)
        self._before = sum(sparse[:first_layer])  # routing layers of earlier stages
        self._choices: list[Choice] = []
        self.topk = self.experts = 0
        for module in model.modules():
            if isinstance(module, TopKRouter):
                choice: Any = Choice()
                module.router_replay = choice
                self._choices.append(choice)
                self.topk, self.experts = module.topk, module.config.num_moe_experts

    def forget(self) -> None:
        """Passes that had no backward pass, such as scores, leave nothing to the next."""
        for choice in self._choices:
            choice.again.clear()

    @contextmanager
    def around(self, turn: Turn, replayed: bool, wanted: bool, out: list[Caught]) -> Iterator[None]:
        """Inside, one forward pass of `turn`. Free choices are added to `out` if `wanted`."""
        columns = turn.ids_BT.shape[1] // parallel_state.get_tensor_model_parallel_world_size()
        first = parallel_state.get_tensor_model_parallel_rank() * columns
        if replayed and self._choices:
            recorded_BTLK = self._recorded(turn)
            for at, choice in enumerate(self._choices):
                ids_BSK = recorded_BTLK[:, first : first + columns, self._before + at]
                choice.told = ids_BSK.transpose(0, 1).reshape(-1, self.topk).to(turn.ids_BT.device)
        try:
            yield
        finally:
            free = [choice.free for choice in self._choices]
            for choice in self._choices:
                choice.told = choice.free = None
        if wanted and turn.indices and self._choices:
            ids = torch.stack([f for f in free if f is not None], dim=1).to(torch.int16).cpu()
            shape = (columns, turn.ids_BT.shape[0], len(self._choices), self.topk)
            out.append(Caught(turn.indices, first, self._before, shape, ids.numpy().tobytes()))

    def _recorded(self, turn: Turn) -> Tensor:
        """[B, T, L, K]; pads go to the first K experts."""
        rows, columns = turn.ids_BT.shape
        ids_BTLK = torch.arange(self.topk).repeat(rows, columns, self.layers, 1)
        for b, sample in enumerate(turn.samples):
            assert sample.routes is not None
            ids_BTLK[b, : fed(sample)] = sample.routes.ids()[: fed(sample)]
        return ids_BTLK


def joined(samples: Sequence[Sample], caught: Sequence[Caught], layers: int, topk: int) -> list[Tensor]:
    """Free choices of each sample over all ranks: int64 [fed, L, K]."""
    out = [torch.full((fed(s), layers, topk), -1, dtype=torch.int64) for s in samples]
    for part in caught:
        ids_SBLK = torch.frombuffer(bytearray(part.ids), dtype=torch.int16).reshape(part.shape).long()
        width, _, held, _ = part.shape
        for b, index in enumerate(part.indices):
            stop = min(fed(samples[index]) - part.column, width)
            if stop > 0:
                place = out[index][part.column : part.column + stop, part.layer : part.layer + held]
                place.copy_(ids_SBLK[:stop, b])
    return out

"""Micro-batches of one data-parallel rank, run through Megatron's schedules.

All data-parallel ranks make the same number of passes over rectangles of the same shape, since experts that are spread
over them exchange tokens in each. A rank without samples in a turn runs pads alone, which weigh nothing.

Legend: B rows, T columns (right-padded; a multiple of tp), N sampled tokens in row order, V the rank's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.contract.sharding.grid import Grid
from syncline.trainer.engine import Sample
from syncline.trainer.engines.forward import Rows, cut, fed, rows_of
from syncline.trainer.engines.megatron.library import get_forward_backward_func, parallel_state, quiet
from syncline.trainer.engines.megatron.vocab import sampled
from syncline.trainer.pack import micro_batches


@dataclass(frozen=True)
class Turn:
    """One pass. `indices`: of its samples in the call; none: pads alone. `ids_BT` has the shape of the whole turn."""

    indices: tuple[int, ...]
    samples: tuple[Sample, ...]
    rows: Rows | None
    ids_BT: Tensor


Take = Callable[[Turn, Tensor], Tensor]
"""(turn, this rank's logits [B, T, V]) on the last stage -> the scalar to differentiate."""
Around = Callable[[Turn], AbstractContextManager[None]]


def turns(
    samples: Sequence[Sample], cells: int, grid: Grid, dp_rank: int, device: torch.device
) -> list[Turn]:
    """This rank's passes over `samples`. `cells`: bound on rows x columns of one."""
    plan = micro_batches([fed(s) for s in samples], cells)
    out = []
    for start in range(0, len(plan), grid.dp):
        together = plan[start : start + grid.dp]
        rows = max(len(indices) for indices in together)
        widest = max(fed(samples[i]) for indices in together for i in indices)
        columns = -(-widest // grid.tp) * grid.tp
        mine = together[dp_rank] if dp_rank < len(together) else []
        out.append(_turn(samples, mine, rows, columns, device))
    return out


def _turn(
    samples: Sequence[Sample], indices: list[int], rows: int, columns: int, device: torch.device
) -> Turn:
    mine = tuple(samples[i] for i in indices)
    if not mine:
        return Turn((), (), None, torch.zeros(rows, columns, dtype=torch.int64, device=device))
    made = rows_of(mine, device)
    ids_BT = F.pad(made.ids_BT, (0, columns - made.ids_BT.shape[1], 0, rows - made.ids_BT.shape[0]))
    return Turn(tuple(indices), mine, made, ids_BT)


def run(model: Any, passes: Sequence[Turn], take: Take, around: Around, backward: bool) -> None:
    """All `passes` through the pipeline, in order; gradients add up in the model if `backward`.

    take     is called on the last stage alone
    around   what surrounds this rank's forward pass of a turn
    """
    if not passes:
        return

    def forward(turns_left: Iterator[Turn], module: Any) -> tuple[Tensor, Any]:
        turn = next(turns_left)
        rows, columns = turn.ids_BT.shape
        device = turn.ids_BT.device
        positions_BT = torch.arange(columns, device=device).expand(rows, columns)
        hidden_TT = torch.ones(columns, columns, dtype=torch.bool, device=device).triu(1)
        with around(turn):
            out = module(turn.ids_BT, positions_BT, hidden_TT[None, None])
        return out, partial(_loss, take, turn)

    with torch.set_grad_enabled(backward), quiet():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(passes),
            model=model,
            num_microbatches=len(passes),
            seq_length=max(turn.ids_BT.shape[1] for turn in passes),
            micro_batch_size=max(turn.ids_BT.shape[0] for turn in passes),
            forward_only=not backward,
        )


def _loss(take: Take, turn: Turn, logits_BTV: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """As Megatron's schedules take it: nothing is divided by the number of tokens, which is told as 1."""
    loss = take(turn, logits_BTV)
    return loss, torch.ones((), dtype=torch.int, device=loss.device), {}


def nothing(logits_BTV: Tensor) -> Tensor:
    """A loss of 0 that still asks every parameter for its gradient."""
    return logits_BTV[:0].float().sum()


def sampled_logprobs(turn: Turn, logits_BTV: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """log-softmax(logits / temperature) at the sampled ids, and the entropy: float32 [N], equal on all ranks of TP.

    vocab   ids of the model, without the padding that the last ranks may hold
    """
    rows = turn.rows
    assert rows is not None
    logits_NV = logits_BTV[rows.row_N, rows.column_N].float() / rows.temperature_N[:, None]
    width = logits_NV.shape[1]
    first = parallel_state.get_tensor_model_parallel_rank() * width
    logits_NV = cut(logits_NV, rows, first)
    real = min(max(vocab - first, 0), width)
    group = parallel_state.get_tensor_model_parallel_group()
    return sampled(logits_NV, rows.target_N, first, real, group)

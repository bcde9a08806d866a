"""Log-probabilities and entropy where each tensor-parallel rank holds a slice of the vocabulary.

Legend: N sampled tokens, V columns that this rank holds. Forward sums over the ranks; the gradient of a rank's slice
needs nothing from the others. One rank: the same arithmetic without a group.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def sampled(
    logits_NV: Tensor, target_N: Tensor, first: int, real: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """log-softmax at the sampled ids, and the entropy there: float32 [N] each, equal on every rank of `group`.

    logits_NV   float32, divided by the temperature already; columns from `real` on are padding and take no part
    first       vocabulary id of column 0
    """
    out = _Sampled.apply(logits_NV, target_N, first, real, group)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], out)


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, target_N: Tensor, first: int, real: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        logits_NV = logits_NV.clone()
        logits_NV[:, real:] = -torch.inf
        most_N = _reduced(logits_NV.amax(dim=1), group, dist.ReduceOp.MAX)
        weight_NV = (logits_NV - most_N[:, None]).exp()
        mass_N = _reduced(weight_NV.sum(dim=1), group)
        prob_NV = weight_NV / mass_N[:, None]
        mine_N = (target_N >= first) & (target_N < first + real)
        column_N = (target_N - first).clamp(0, logits_NV.shape[1] - 1)
        chosen_N = logits_NV.gather(1, column_N[:, None]).squeeze(1)
        chosen_N = _reduced(torch.where(mine_N, chosen_N, 0.0), group)
        # a padding column has probability 0 and logit -inf
        logits_NV[:, real:] = 0.0
        mean_N = _reduced((prob_NV * logits_NV).sum(dim=1), group)
        total_N = most_N + mass_N.log()
        ctx.save_for_backward(prob_NV, logits_NV, mean_N, mine_N, column_N)
        return chosen_N - total_N, total_N - mean_N

    @staticmethod
    def backward(
        ctx: Any, of_logprob_N: Tensor, of_entropy_N: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        prob_NV, logits_NV, mean_N, mine_N, column_N = ctx.saved_tensors
        out_NV = -prob_NV * (of_logprob_N[:, None] + of_entropy_N[:, None] * (logits_NV - mean_N[:, None]))
        out_NV.scatter_add_(1, column_N[:, None], torch.where(mine_N, of_logprob_N, 0.0)[:, None])
        return out_NV, None, None, None, None


def _reduced(values_N: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values_N, op=op, group=group)
    return values_N

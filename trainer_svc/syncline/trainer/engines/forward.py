"""Log-probabilities of sampled tokens from one padded forward pass.

Shape legend: B rows, T columns (right-padded), N sampled tokens of the micro-batch in row order, V
vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from syncline.trainer.engine import Sample

_NEVER = -1e30
"""Logit of what a mask leaves out: its probability is 0, and 0 times it is no NaN."""


@dataclass(frozen=True)
class Rows:
    """A micro-batch as tensors.

    ids_BT, mask_BT, positions_BT   what the model reads; pads are on the right, under mask 0
    row_N, column_N                 the cell that predicts each sampled token
    target_N                        the sampled token
    temperature_N                   float32
    lengths_B                       sampled tokens per row
    kept                            (token of N, id) [2, M] of all sampling masks, and which tokens [N] have none;
                                    None: no token has one
    """

    ids_BT: Tensor
    mask_BT: Tensor
    positions_BT: Tensor
    row_N: Tensor
    column_N: Tensor
    target_N: Tensor
    temperature_N: Tensor
    lengths_B: Tensor
    kept: tuple[Tensor, Tensor] | None = None


def fed(sample: Sample) -> int:
    """Tokens of `sample` that the model reads: up to the last one that predicts a sampled token."""
    return sample.positions[-1]


def rows_of(samples: Sequence[Sample], device: torch.device) -> Rows:
    """Tensors of `samples`, one row each.

    Pads are on the right: a causal model, recurrent layers included, has passed every real token before it
    meets one, so what a row says does not depend on its neighbours.
    """
    width = max(fed(s) for s in samples)
    padded = array("i")
    for sample in samples:
        padded += sample.tokens[: fed(sample)] + array("i", bytes(4 * (width - fed(sample))))
    ids_BT = torch.frombuffer(padded, dtype=torch.int32).view(len(samples), width).long()
    mask_BT = (torch.arange(width) < torch.tensor([fed(s) for s in samples])[:, None]).long()
    lengths_B = torch.tensor([len(s.positions) for s in samples])
    positions_N = torch.tensor([p for s in samples for p in s.positions])
    target_N = torch.tensor([s.tokens[p] for s in samples for p in s.positions])
    temperature_B = torch.tensor([s.temperature for s in samples], dtype=torch.float32)
    return Rows(
        ids_BT=ids_BT.to(device),
        mask_BT=mask_BT.to(device),
        positions_BT=torch.arange(width).expand(len(samples), width).to(device),
        row_N=torch.arange(len(samples)).repeat_interleave(lengths_B).to(device),
        column_N=(positions_N - 1).to(device),
        target_N=target_N.to(device),
        temperature_N=temperature_B.repeat_interleave(lengths_B).to(device),
        lengths_B=lengths_B.to(device),
        kept=_kept(samples, device),
    )


def _kept(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor] | None:
    if all(s.mask is None for s in samples):
        return None
    sizes, ids, whole = array("i"), array("i"), bytearray()
    for s in samples:
        count = len(s.positions)
        sizes.extend(array("i", [0] * count) if s.mask is None else s.mask.sizes)
        ids.extend(array("i") if s.mask is None else s.mask.ids)
        whole += bytes([s.mask is None]) * count
    of_M = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    pairs = torch.stack([of_M, torch.tensor(ids, dtype=torch.int64)])
    return pairs.to(device), torch.tensor(list(whole)).bool().to(device)


def cut(scaled_NV: Tensor, rows: Rows, first: int = 0) -> Tensor:
    """Logits of which each token's sampling mask leaves the ids that it names; the others get no probability.

    first   vocabulary id of column 0
    """
    if rows.kept is None:
        return scaled_NV
    (of_M, id_M), whole_N = rows.kept
    here_M = (id_M >= first) & (id_M < first + scaled_NV.shape[1])
    left_NV = whole_N[:, None].expand_as(scaled_NV).clone()
    left_NV[of_M[here_M], id_M[here_M] - first] = True
    return scaled_NV.masked_fill(~left_NV, _NEVER)


def sampled_logprobs(model: PreTrainedModel, rows: Rows, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """log-softmax(logits / temperature) at the sampled ids, and the entropy there: float32 [N] each. Both are over the
    sampling mask, where a sample has one.

    Only positions that predict a sampled token pass the output head. The entropy carries a gradient if asked to.
    """
    with _only_sampled(model, rows):
        logits_1NV = model(
            input_ids=rows.ids_BT,
            attention_mask=rows.mask_BT,
            position_ids=rows.positions_BT,
            use_cache=False,
        ).logits
    scaled_NV = cut(logits_1NV[0].float() / rows.temperature_N[:, None], rows)
    if entropy_gradient:
        logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
        return logprobs_NV.gather(1, rows.target_N[:, None]).squeeze(1), entropy_N
    logprobs_N, entropy_N = _Sampled.apply(scaled_NV, rows.target_N)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N


class _Sampled(torch.autograd.Function):
    """Log-probs of the targets [N] and the entropy [N] of logits [N, V], which are overwritten. The entropy carries no
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        logprobs_N = logprobs_NV.gather(1, target_N[:, None])[:, 0]
        probs_NV = torch.exp(logprobs_NV, out=logits_NV)
        entropy_N = -torch.linalg.vecdot(probs_NV, logprobs_NV)
        ctx.save_for_backward(probs_NV, target_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor, _: Any) -> tuple[Tensor, None]:
        probs_NV, target_N = ctx.saved_tensors
        out_NV = probs_NV * -gradient_N[:, None]
        out_NV.scatter_add_(1, target_N[:, None], gradient_N[:, None])
        return out_NV, None


@contextmanager
def _only_sampled(model: PreTrainedModel, rows: Rows) -> Iterator[None]:
    """Inside, the output head sees [1, N] positions instead of [B, T]. What a family does to logits comes after it."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def chosen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0][rows.row_N, rows.column_N][None], *args[1:])

    handle = head.register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        handle.remove()

"""Expert ids that the trainer's routers choose by themselves, for comparing with those of another engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.reference.routes import RouteTap
from syncline.trainer.engine import Sample
from syncline.trainer.engines.forward import fed, rows_of, sampled_logprobs


@torch.no_grad()
def free_routes(model: torch.nn.Module, tap: RouteTap, samples: Sequence[Sample]) -> list[Tensor]:
    """Ids [fed, L, K] (int64, on CPU) of each sample, from one forward pass; the model routes."""
    rows = rows_of(samples, next(model.parameters()).device)
    with tap.catching(True) as caught:
        sampled_logprobs(model, rows, False)  # type: ignore[arg-type]  # a PreTrainedModel
    ids_BTLK = tap.stacked(caught).long().cpu().reshape(*rows.ids_BT.shape, tap.layers, tap.topk)
    return [ids_TLK[: fed(sample)] for ids_TLK, sample in zip(ids_BTLK, samples, strict=True)]

"""Prefill scores: log-probs of given tokens under weights that are held, in one forward pass.

Legend: T tokens, P scored positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.contract.schemes import KvFormat
from syncline.rollout.engine import Experts, Score
from syncline.rollout.engines.kv import growing_cache
from syncline.rollout.engines.weights import Weights


@torch.inference_mode()
def prefill_score(
    weights: Weights,
    ids: Sequence[int],
    positions: Sequence[int],
    *,
    temperature: float,
    experts: bool,
    kv: KvFormat,
) -> Score:
    """See `RolloutEngine.score`. `positions` rise; raises `ValueError` for one that is outside `ids` or its first."""
    if not positions or not 0 < positions[0] <= positions[-1] < len(ids):
        raise ValueError(
            f"positions {list(positions[:3])}... of {len(ids)} ids: nothing to score, or none there"
        )
    ids_1T = torch.tensor([list(ids)], dtype=torch.int64)
    at_P = torch.tensor(list(positions))
    cache = None if kv == "wide" else growing_cache(weights.model.config, kv)
    with weights.taps.catching(experts) as caught:
        logits_TV = weights.model(input_ids=ids_1T, cache=cache, use_cache=cache is not None).logits[0]
    logprobs_PV = torch.log_softmax(logits_TV[at_P - 1].float() / temperature, dim=-1)
    scored_P = logprobs_PV.gather(-1, ids_1T[0, at_P, None])[:, 0]
    routed = None
    if caught:
        stacked = weights.taps.stacked(caught)[:-1].numpy()
        tokens, layers, topk = stacked.shape
        routed = Experts(stacked.tobytes(), (tokens, layers, topk), "u1" if stacked.itemsize == 1 else "u2")
    return Score(logprobs=tuple(scored_P.tolist()), experts=routed)

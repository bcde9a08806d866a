"""Drawing tokens for a whole batch, each row with its own parameters and its own random numbers.

Tokens are drawn by inverting the cumulative distribution at a uniform number that belongs to the request, so
a row's draw depends on nothing but its logits and its number. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from syncline.rollout.engine import Sampling

UNIFORMS = 256  # drawn at a time
_BELOW_ONE = 1.0 - 1e-12  # so that no product with the total reaches the total


class Draws:
    """A request's random numbers: a function of its seed alone."""

    def __init__(self, seed: Sequence[int]) -> None:
        text = "/".join(str(part) for part in seed)
        self._generator = torch.Generator()
        self._generator.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)
        self._normal = float(torch.randn((), generator=self._generator, dtype=torch.float64))

    def length(self, sampling: Sampling) -> tuple[int, int]:
        """(least, most) tokens of the response: stop tokens are suppressed below `least`."""
        if sampling.length == "stop":
            return min(sampling.min_tokens, sampling.max_tokens), sampling.max_tokens
        drawn = round(sampling.length_median * math.exp(sampling.length_sigma * self._normal))
        length = max(1, sampling.min_tokens, min(drawn, sampling.max_tokens))
        return length, length

    def uniforms(self) -> Tensor:
        """The next `UNIFORMS` numbers of [0, 1), float64."""
        return torch.rand(UNIFORMS, generator=self._generator, dtype=torch.float64) * _BELOW_ONE


class Cuts(msgspec.Struct, frozen=True):
    """Per-row parameters of a draw: temperature [R, 1], top_p [R, 1], top_k [R, 1] (0: none); `any`: a row
    cuts. `recorded` [R] bool: rows whose log-probs are taken after the cut, with its mask; None: no row's.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    any: bool
    recorded: Tensor | None = None


def draw(
    logits: Tensor, uniforms: Tensor, cuts: Cuts, suppressed: Tensor | bool, stop_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens [R] (int64) and their log-probs [R] (float32) from `logits` [R, V]: scaled, and of `cuts.recorded` rows
    processed. Then the support [R, V] (bool) that tokens were drawn from, if a row's is recorded.

    suppressed   [R] bool: rows that may not draw a stop token; or what holds for all
    """
    logprobs_RV = torch.log_softmax(logits.float() / cuts.temperature, dim=-1)
    weights_RV = logprobs_RV.double().exp_()
    if suppressed is True:
        weights_RV.index_fill_(1, stop_ids, 0.0)
    elif suppressed is not False:
        weights_RV[:, stop_ids] = weights_RV[:, stop_ids].masked_fill(suppressed[:, None], 0.0)
    if cuts.any:
        weights_RV = _cut(weights_RV, cuts)
    cumulative_RV = weights_RV.cumsum(-1)
    at_R1 = (uniforms * cumulative_RV[:, -1])[:, None]
    tokens_R1 = torch.searchsorted(cumulative_RV, at_R1, right=True)
    scaled_R = logprobs_RV.gather(-1, tokens_R1)[:, 0]
    if cuts.recorded is None:
        return tokens_R1[:, 0], scaled_R, None
    support_RV = weights_RV > 0
    cut_RV = torch.log_softmax(logprobs_RV.masked_fill(~support_RV, -torch.inf), dim=-1)
    processed_R = cut_RV.gather(-1, tokens_R1)[:, 0]
    return tokens_R1[:, 0], torch.where(cuts.recorded, processed_R, scaled_R), support_RV


def _cut(weights_RV: Tensor, cuts: Cuts) -> Tensor:
    """Zero what top-k, then top-p of the rest, leave out. The token that crosses top_p is kept."""
    sorted_RV, order_RV = weights_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(weights_RV.shape[-1])
    out_RV = (cuts.top_k > 0) & (rank_V >= cuts.top_k)
    sorted_RV = sorted_RV.masked_fill(out_RV, 0.0)
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    limit_R1 = cuts.top_p * sorted_RV.sum(-1, keepdim=True)
    sorted_RV = sorted_RV.masked_fill((cuts.top_p < 1) & (before_RV >= limit_R1), 0.0)
    return torch.zeros_like(weights_RV).scatter_(-1, order_RV, sorted_RV)

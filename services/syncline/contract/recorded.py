"""What a trajectory may hold of how its tokens came about: expert ids, and the sampling mask. Checked like the rest.

The mask is the support that top-k and top-p left at each sampled token. With it the true sampling distribution can be
scored again under other weights: log-softmax over those ids alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

import msgspec


class SamplingMask(msgspec.Struct, frozen=True, gc=False):
    """Ids that the cut left, for S sampled tokens in order.

    sizes   array('i') [S]  how many are left at each token, at least 1
    ids     array('i') [sum of sizes]  token after token, each of them unlike the others of its token
    """

    sizes: array[int]
    ids: array[int]

    def supports(self) -> list[array[int]]:
        """The ids of each token."""
        ends = list(accumulate(self.sizes))
        return [self.ids[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]


def mask_of(supports: Iterable[Collection[int]]) -> SamplingMask:
    """The mask of these supports, one per sampled token."""
    sizes, ids = array("i"), array("i")
    for support in supports:
        sizes.append(len(support))
        ids.extend(support)
    return SamplingMask(sizes, ids)


def joined(masks: Sequence[SamplingMask | None]) -> SamplingMask | None:
    """One after another; None: there is none. Raises `ValueError` where some have one and others not."""
    there = [mask for mask in masks if mask is not None]
    if not there:
        return None
    if len(there) != len(masks):
        raise ValueError("a sampling mask for some of the tokens")
    sizes, ids = array("i"), array("i")
    for mask in there:
        sizes.extend(mask.sizes)
        ids.extend(mask.ids)
    return SamplingMask(sizes, ids)


def mask_contradiction(mask: SamplingMask | None, sampled: Sequence[int], processed: bool) -> str:
    """What is wrong with the mask of these sampled ids; empty: nothing."""
    if mask is None:
        return ""
    if not processed:
        return "a sampling mask beside log-probs that were taken before the cut"
    if len(mask.sizes) != len(sampled):
        return f"a sampling mask for {len(mask.sizes)} of {len(sampled)} sampled tokens"
    if min(mask.sizes, default=1) < 1 or sum(mask.sizes) != len(mask.ids):
        return f"a sampling mask of {len(mask.ids)} ids whose sizes do not add up to that"
    for n, (token, support) in enumerate(zip(sampled, mask.supports(), strict=True)):
        if token not in support:
            return f"sampled token {n} is {token}, which is outside its own sampling mask"
        if len(set(support)) != len(support) or min(support) < 0:
            return f"the sampling mask of token {n} names an id twice, or one below 0"
    return ""


def expert_contradiction(
    tokens: int, ids: bytes | None, shape: tuple[int, int, int] | None, dtype: str | None
) -> str:
    """What is wrong with the expert ids of a record of so many tokens; empty: nothing."""
    if ids is None or shape is None or dtype is None:
        together = ids is None and shape is None and dtype is None
        return "" if together else "expert_ids, expert_shape and expert_dtype come together or not at all"
    fed, layers, topk = shape
    if fed != tokens - 1:
        return f"expert ids for {fed} tokens, expected {tokens - 1}"
    if len(ids) != fed * layers * topk * (1 if dtype == "u1" else 2):
        return f"expert ids of {len(ids)} bytes for shape {shape}"
    return ""

"""Level 5: routes and request state. What depends on the history of a request, and on its neighbours in a batch.

The records were decoded step by step, several at a time; prefill scores them alone and at once. Whatever a step keeps
(KV, recurrent state, convolution window, sparse-attention index) must not show, and neither must a neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from syncline.contract.token_path import Trajectory
from syncline.lab.ladder import kept
from syncline.lab.ladder.apart import SUMS, SUMS_SOURCE, apart_N, gap
from syncline.lab.ladder.diagnosis import EXPERTS
from syncline.lab.ladder.records import Check, absent
from syncline.lab.ladder.subject import Subject
from syncline.lab.measure import Scores, behaviour
from syncline.numerics.route_agreement import RouteCounts
from syncline.reference.routes import RecordedRoutes
from syncline.rollout.engine import Experts, Score

TIES = 0.002
"""Share of choices: two experts whose logits are equal to the last bits may change places."""
FLIPS = 0.02
"""Nats, mean: a sum in another order may move an activation across the edge between two codes."""
GROWTH = 3.0
"""Times the gap of a response's first half by which the second may differ before it grows with the context."""


def checks(subject: Subject) -> Iterator[Check]:
    """Routes by layer, the trainer's batch, decode against prefill, and the gap along the context."""
    records, names, kv = subject.records, subject.names, subject.contract.rollout.kv_cache
    wide, stored = subject.prefill("wide"), subject.prefill(kv)
    matched = subject.matched_routes()
    order, order_source = order_of(subject)
    if matched is None:
        yield absent("experts", "the model does not route")
    else:
        yield _routes(EXPERTS, matched, wide, TIES)
    together = subject.pair.score_trainer(records, as_rollout=True)
    alone = subject.trainer_alone(as_rollout=True)
    name = "the trainer's batch against one at a time"
    yield gap(name, together, alone, names, bound=order, source=order_source)
    prefilled = [score.logprobs for score in stored]
    if kv != "wide":
        yield gap(
            f"a context in {kv} against a wide one",
            prefilled,
            [score.logprobs for score in wide],
            names,
            bound=subject.contract.expected.high or float("inf"),
            source="expected.high of the contract",
        )
    yield from kept.checks(subject, order, order_source)
    if matched is not None:
        due = wide if kv == "wide" else stored
        yield _routes("experts: decode against prefill", _recorded(records), due, max(TIES, order))
    decoded = behaviour(records)
    yield gap("decode against prefill", decoded, prefilled, names, bound=order, source=order_source)
    yield _growth(records, decoded, prefilled, order)


def order_of(subject: Subject) -> tuple[float, str]:
    """What another order of additions may do: nothing but itself, or, where activations have codes, a few flips."""
    if any(family.activation is not None for family in subject.contract.families):
        return FLIPS, "activations at the edge between two codes"
    return SUMS, SUMS_SOURCE


# ---- routes -----------------------------------------------------------------------------------------------------
def _recorded(records: Sequence[Trajectory]) -> list[Tensor]:
    out = []
    for record in records:
        assert record.expert_ids is not None
        assert record.expert_shape is not None
        assert record.expert_dtype is not None
        out.append(RecordedRoutes(record.expert_ids, record.expert_shape, record.expert_dtype).ids())
    return out


def _ids(experts: Experts | None) -> Tensor:
    assert experts is not None, "a model that routes scores with its experts"
    return RecordedRoutes(experts.data, experts.shape, experts.dtype).ids()


def _routes(name: str, one: Sequence[Tensor], other: Sequence[Score], bound: float) -> Check:
    """Expert ids by layer: the first layer that differs says more than the last log-prob."""
    counts = [RouteCounts.of(a, _ids(b.experts)) for a, b in zip(one, other, strict=True)]
    tokens = sum(c.tokens for c in counts)
    layers = len(counts[0].equal)
    unequal = [1 - sum(c.equal[n] for c in counts) / tokens for n in range(layers)]
    first = next((f"layer {n}" for n, share in enumerate(unequal) if share > bound), "")
    return Check(
        name=name,
        found=max(unequal),
        bound=bound,
        source="equal values choose equal experts, but for ties and values at the edge between two codes",
        unit="of tokens, in the worst layer",
        where=first,
    )


# ---- context ----------------------------------------------------------------------------------------------------
def _growth(records: Sequence[Trajectory], one: Scores, other: Scores, bound: float) -> Check:
    """The gap of the second half of each response beside that of the first; counts only where there is a gap."""
    apart, early, late = apart_N(one, other), [], []
    start = 0
    for record in records:
        middle, end = start + record.sampled // 2, start + record.sampled
        early.append(apart[start:middle])
        late.append(apart[middle:end])
        start = end
    before, after = (float(np.concatenate(part).mean()) for part in (early, late))
    bound = max(GROWTH * before, bound)
    return Check(
        name="the gap does not grow with the context",
        found=after,
        bound=bound,
        source=f"{GROWTH:g} times the gap of the first half of each response",
        unit="nats, mean",
        where="" if after <= bound else f"first half {before:.3g}, second {after:.3g}",
    )

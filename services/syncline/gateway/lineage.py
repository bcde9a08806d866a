"""A token's path, put together from the record, its reward, its scores and its spans. Pure: nothing is fetched here.

The record is the truth. A hop's span adds when and how long; a hop that the record proves and no span tells of is
told from the record, and one that neither knows is listed as missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from syncline.contract.token_path import TOKEN_PATH, Trajectory, VersionSpan
from syncline.gateway.diagnosed import Decomposition
from syncline.gateway.gathering import Gathered
from syncline.gateway.shapes import (
    HopView,
    TokenPath,
    TokenView,
    TrajectoryView,
    VersionView,
    reward_view,
)
from syncline.gateway.token_text import TokenText
from syncline.gateway.version_lineage import hop_view
from syncline.runtime.tracing import SpanRecord

_HOPS = tuple(hop.name for hop in TOKEN_PATH)
_BY = {hop.name: hop.done_by for hop in TOKEN_PATH}


def trajectory_view(found: Gathered, spans: Sequence[SpanRecord]) -> TrajectoryView:
    """The whole trajectory; `hops` by time, those of earlier attempts included."""
    record, score = found.record, found.score
    return TrajectoryView(
        job=record.job,
        trajectory=record.trajectory,
        group=record.group,
        index=record.index,
        prompt=record.prompt,
        attempt=record.attempt,
        state=found.state,
        update=found.update,
        lag=found.lag,
        reason=found.reason,
        text=record.text,
        finish=record.finish,
        tokens=record.tokens.tolist(),
        segments=record.segments,
        logprobs=record.logprobs.tolist(),
        trainer_logprobs=None if score is None else score.logprobs.tolist(),
        loss_mask=list(record.loss_mask),
        spans=record.spans,
        convention=record.convention,
        contract=record.contract,
        expert_shape=record.expert_shape,
        reward=None if found.reward is None else reward_view(found.reward),
        advantage=found.advantage,
        timing=record.timing,
        traceparent=record.traceparent,
        hops=[hop_view(span) for span in spans if span.name in _BY],
    )


def token_path(
    found: Gathered, token: int, spans: Sequence[SpanRecord], version: VersionView | None, text: TokenText
) -> TokenPath:
    """The path of sampled token `token`, which the record has."""
    record, score = found.record, found.score
    span = next(span for span in record.spans if span.start <= token < span.end)
    position = _position(found, token)
    id = record.tokens[position]
    behaviour = record.logprobs[token]
    trainer = None if score is None else score.logprobs[token]
    hops = _hops(found, token, span, spans)
    decoded, piece = text(id)
    return TokenPath(
        job=record.job,
        trajectory=record.trajectory,
        group=record.group,
        index=record.index,
        attempt=record.attempt,
        prompt=record.prompt,
        token=TokenView(index=token, position=position, id=id, text=decoded, piece=piece),
        span=span,
        behaviour_logprob=behaviour,
        trainer_logprob=trainer,
        gap=None if trainer is None else trainer - behaviour,
        decomposition=_decomposition(found, token),
        convention=record.convention,
        loss_mask=record.loss_mask[token],
        routes=routes_at(record, position),
        state=found.state,
        update=found.update,
        lag=None if found.update is None else found.update - 1 - span.version.number,
        reward=None if found.reward is None else reward_view(found.reward),
        advantage=found.advantage,
        hops=hops,
        missing=[name for name in _HOPS if name not in {hop.hop for hop in hops}],
        version=version,
    )


def routes_at(record: Trajectory, position: int) -> list[list[int]] | None:
    """Experts chosen where the token at `position` was sampled: the position before it was fed last."""
    if record.expert_ids is None or record.expert_shape is None:
        return None
    _, layers, topk = record.expert_shape
    width = 1 if record.expert_dtype == "u1" else 2
    start = (position - 1) * layers * topk * width
    raw = record.expert_ids[start : start + layers * topk * width]
    ids = [int.from_bytes(raw[i : i + width], "little") for i in range(0, len(raw), width)]
    return [ids[layer * topk : (layer + 1) * topk] for layer in range(layers)]


def _decomposition(found: Gathered, token: int) -> Decomposition | None:
    probed = next((row for row in found.probed if row.token == token), None)
    if probed is None:
        return None
    return Decomposition(
        worker=probed.worker,
        rollout_logprob=probed.rollout,
        total=probed.total,
        mismatch=probed.mismatch,
        staleness=probed.staleness,
        kv_cache=probed.kv_cache,
    )


def _position(found: Gathered, token: int) -> int:
    """Place in the record's tokens of the sampled token number `token`."""
    left = token
    for segment in found.record.segments:
        if segment.kind == "sampled":
            if left < segment.end - segment.start:
                return segment.start + left
            left -= segment.end - segment.start
    raise AssertionError(f"{found.record.trajectory}: sampled token {token} lies in no segment")


# ---- hops -------------------------------------------------------------------------------------------------
def _hops(found: Gathered, token: int, span: VersionSpan, spans: Sequence[SpanRecord]) -> list[HopView]:
    """Of this token alone, in the order of `TOKEN_PATH`; of a hop passed again after a resume the last."""
    passed: dict[str, HopView] = {}
    for one in spans:
        if one.name in _BY and _concerns(one, found, token, span):
            passed[one.name] = hop_view(one)
    for hop in _from_record(found, span):
        passed.setdefault(hop.hop, hop)
    return [passed[name] for name in _HOPS if name in passed]


def _concerns(one: SpanRecord, found: Gathered, token: int, span: VersionSpan) -> bool:
    said = one.attributes
    if said.get("attempt", found.record.attempt) != found.record.attempt:
        return False
    if "update" in said and said["update"] != found.update:
        return False
    if one.name != "token.sampled":
        return True
    start, end = said.get("start"), said.get("end")
    inside = isinstance(start, int) and isinstance(end, int) and start <= token < end
    return inside and said.get("version") == str(span.version)


def _from_record(found: Gathered, span: VersionSpan) -> list[HopView]:
    """What the record proves. The times that it holds are for people: only the start of sampling is one."""
    record = found.record
    attempt: dict[str, Any] = {"attempt": record.attempt}
    hops = [
        _told(found, "token.prompted", group=record.group, index=record.index),
        _told(
            found,
            "token.sampled",
            at=record.timing.started,
            **attempt,
            worker=span.worker,
            version=str(span.version),
            digest=span.digest,
            context=span.context,
            start=span.start,
            end=span.end,
        ),
        _told(
            found,
            "token.published",
            **attempt,
            worker=record.spans[-1].worker,
            tokens=len(record.logprobs),
            spans=len(record.spans),
        ),
    ]
    if found.reward is not None:
        reward = found.reward
        hops.append(_told(found, "token.rewarded", **attempt, state=reward.state, reward=reward.value))
    if found.update is not None:
        hops.append(_told(found, "token.admitted", update=found.update, lag=found.lag))
    if found.score is not None:
        gaps = [abs(gap) for gap in found.score.gap if math.isfinite(gap)]
        mean = math.fsum(gaps) / len(gaps) if gaps else None
        hops.append(_told(found, "token.scored", update=found.update, mean_abs_logprob_gap=mean))
        minted = None if found.minted is None else str(found.minted)
        if found.state == "trained":
            hops.append(
                _told(found, "token.trained", update=found.update, minted=minted, advantage=found.advantage)
            )
    return hops


def _told(found: Gathered, hop: str, at: float | None = None, **attributes: Any) -> HopView:
    return HopView(
        hop=hop,
        source="record",
        at=at,
        seconds=None,
        service=_BY[hop],
        instance=str(attributes.get("worker", _BY[hop])),
        attributes={"trajectory": found.record.trajectory, **attributes},
    )

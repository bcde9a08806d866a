"""Chunks to version spans and a checked trajectory. Pure: no clock, no engine, no Redis.

Nothing here decides which version sampled a token: chunks say it, and chunks that contradict one another are
refused (`BadChunks`), never repaired.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from syncline.contract.events import WorkItem
from syncline.contract.recorded import SamplingMask, joined
from syncline.contract.token_path import (
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    check,
)
from syncline.contract.turns import Turn
from syncline.rollout.engine import Chunk, Experts


class BadChunks(ValueError):
    """Chunks of one request that do not follow one another. The message names the trajectory and the place."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """All that one request's chunks say together."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    times: tuple[tuple[float, float], ...]  # wall-clock (began, ended) of each span
    finish: Literal["stop", "length"]
    experts: Experts | None
    prefill: float
    decode: float
    mask: SamplingMask | None = None

    def timing(self, queued: float) -> Timing:
        """As records hold it; queued: monotonic seconds before."""
        return Timing(started=self.times[0][0], queued=queued, prefill=self.prefill, decode=self.decode)


def fold(chunks: Sequence[Chunk], worker: str) -> Sampled:
    """Join the chunks of one ended request. Neighbours that differ in nothing but place become one span.

    Raises `BadChunks`.
    """
    if not chunks:
        raise BadChunks("a request ended without a chunk")
    tokens: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    times: list[tuple[float, float]] = []
    for chunk in chunks:
        _check_follows(chunk, chunks[0], len(tokens), chunk is chunks[-1])
        tokens.extend(chunk.tokens)
        logprobs.extend(chunk.logprobs)
        span = _span(chunk, worker)
        if spans and msgspec.structs.replace(spans[-1], start=span.start, end=span.end) == span:
            spans[-1] = msgspec.structs.replace(spans[-1], end=span.end)
            times[-1] = (times[-1][0], chunk.ended)
        else:
            spans.append(span)
            times.append((chunk.began, chunk.ended))
    last = chunks[-1]
    if last.finish is None:
        raise BadChunks(f"trajectory {last.trajectory}: the last chunk does not say how it ended")
    try:
        mask = joined([chunk.mask for chunk in chunks])
    except ValueError as error:
        raise BadChunks(f"trajectory {last.trajectory}: {error}") from None
    return Sampled(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        spans=tuple(spans),
        times=tuple(times),
        finish=last.finish,
        experts=last.experts,
        prefill=last.prefill,
        decode=last.decode,
        mask=mask,
    )


def _check_follows(chunk: Chunk, first: Chunk, sampled: int, last: bool) -> None:
    name = first.trajectory
    if chunk.trajectory != name:
        raise BadChunks(f"trajectory {name}: a chunk of {chunk.trajectory} among its own")
    if not chunk.tokens or len(chunk.tokens) != len(chunk.logprobs):
        raise BadChunks(
            f"trajectory {name}: chunk at {chunk.start} has {len(chunk.tokens)} tokens and "
            f"{len(chunk.logprobs)} log-probs"
        )
    if chunk.start != sampled:
        raise BadChunks(f"trajectory {name}: chunk starts at {chunk.start}, {sampled} tokens are there")
    if chunk.finish is not None and not last:
        raise BadChunks(f"trajectory {name}: a chunk follows the one that ended it")


def _span(chunk: Chunk, worker: str) -> VersionSpan:
    return VersionSpan(
        start=chunk.start,
        end=chunk.start + len(chunk.tokens),
        version=chunk.version,
        digest=chunk.digest,
        adapter=chunk.adapter,
        context=chunk.context,
        carried_age=chunk.carried_age,
        worker=worker,
    )


def one_turn(prompt: int, sampled: int) -> tuple[Segment, ...]:
    """Segments of a prompt of so many tokens and one turn behind it."""
    return (
        Segment(kind="prompt", start=0, end=prompt),
        Segment(kind="sampled", start=prompt, end=prompt + sampled),
    )


def trajectory(
    item: WorkItem,
    attempt: int,
    prompt: Sequence[int],
    sampled: Sampled,
    *,
    convention: SamplingConvention,
    contract: str,
    text: str,
    traceparent: str,
    queued: float,
    tokens: Sequence[int] = (),
    segments: tuple[Segment, ...] = (),
    turns: tuple[Turn, ...] = (),
) -> Trajectory:
    """The record of an ended request. Every sampled token takes part in the loss.

    queued   monotonic seconds from taking the work item to its submission to the engine
    tokens, segments, turns   of several turns: all ids, whose they are, and what was said. Not given: one turn.

    Raises `BadTrajectory` if the parts do not agree, falling versions included.
    """
    experts = sampled.experts
    return check(
        Trajectory(
            job=item.job,
            trajectory=item.trajectory,
            group=item.group,
            index=item.index,
            attempt=attempt,
            prompt=item.prompt,
            tokens=array("i", tokens or [*prompt, *sampled.tokens]),
            segments=segments or one_turn(len(prompt), len(sampled.tokens)),
            logprobs=array("f", sampled.logprobs),
            loss_mask=b"\x01" * len(sampled.tokens),
            spans=sampled.spans,
            convention=convention,
            finish=sampled.finish,
            contract=contract,
            text=text,
            traceparent=traceparent,
            timing=sampled.timing(queued),
            turns=turns,
            expert_ids=experts.data if experts else None,
            expert_shape=experts.shape if experts else None,
            expert_dtype=experts.dtype if experts else None,
            mask=sampled.mask,
        )
    )

"""Folding chunks: whatever an engine may hand out becomes a record that the contract accepts, or is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from syncline.contract.events import WorkItem
from syncline.contract.token_path import BadTrajectory, SamplingConvention, Trajectory
from syncline.contract.trajectory_wire import decode, encode
from syncline.contract.version_path import VersionId
from syncline.rollout.engine import Chunk, Experts
from syncline.rollout.spans import BadChunks, Sampled, fold, trajectory

ITEM = WorkItem(job="j1", trajectory="j1-0-2", group=0, index=2, prompt=7, traceparent="", submitted_at=1.0)


@st.composite
def histories(draw: st.DrawFn) -> list[Chunk]:
    """Chunks as an engine hands them out: versions rise, contexts change, some chunks change nothing."""
    chunks: list[Chunk] = []
    version, age, start = VersionId(draw(st.integers(0, 2)), draw(st.integers(0, 5))), 0, 0
    for _ in range(draw(st.integers(1, 6))):
        rise = draw(st.integers(0, 2))
        if rise and chunks:
            version = VersionId(version.epoch, version.number + rise)
            age = draw(st.sampled_from([0, age + rise]))
        count = draw(st.integers(1, 5))
        chunks.append(
            Chunk(
                trajectory=ITEM.trajectory,
                start=start,
                tokens=tuple(draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))),
                logprobs=tuple(draw(st.lists(st.floats(-30, 0), min_size=count, max_size=count))),
                version=version,
                digest=f"digest of {version}",
                context="carried" if age else "recomputed",
                carried_age=age,
                began=float(start),
                ended=float(start + count),
            )
        )
        start += count
    chunks[-1] = replace(
        chunks[-1], finish=draw(st.sampled_from(["stop", "length"])), prefill=0.5, decode=2.0
    )
    return chunks


def told(sampled: Sampled, prompt: tuple[int, ...] = (1, 5)) -> Trajectory:
    return trajectory(
        ITEM,
        3,
        prompt,
        sampled,
        convention=SamplingConvention(),
        contract="c",
        text="",
        traceparent="",
        queued=0.25,
    )


@given(histories())
def test_every_token_keeps_the_stamp_of_its_chunk(chunks: list[Chunk]) -> None:
    record = decode(encode(told(fold(chunks, "w1"))))
    assert list(record.sampled_ids()) == [token for chunk in chunks for token in chunk.tokens]
    for chunk in chunks:
        for token in range(chunk.start, chunk.start + len(chunk.tokens)):
            span = record.span_of(token)
            assert (span.version, span.digest) == (chunk.version, chunk.digest)
            assert (span.context, span.carried_age) == (chunk.context, chunk.carried_age)
            assert span.worker == "w1"
    assert record.finish == chunks[-1].finish
    assert record.attempt == 3
    assert (record.timing.prefill, record.timing.decode, record.timing.queued) == (0.5, 2.0, 0.25)


@given(histories())
def test_spans_are_as_few_as_the_stamps_allow_and_carry_their_times(chunks: list[Chunk]) -> None:
    sampled = fold(chunks, "w0")
    changes = sum(
        (a.version, a.context, a.carried_age) != (b.version, b.context, b.carried_age)
        for a, b in itertools.pairwise(chunks)
    )
    assert len(sampled.spans) == len(sampled.times) == changes + 1
    for span, (began, ended) in zip(sampled.spans, sampled.times, strict=True):
        assert (began, ended) == (span.start, span.end)


@given(histories(), st.data())
def test_chunks_that_contradict_one_another_are_refused(chunks: list[Chunk], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(chunks) - 1))
    fault = data.draw(st.sampled_from(["lost", "moved", "uneven", "foreign", "early end", "no end", "empty"]))
    bent = list(chunks)
    match fault:
        case "lost":
            del bent[at]
            if at == len(chunks) - 1 and bent:
                bent[-1] = replace(bent[-1], finish=None)
        case "moved":
            bent[at] = replace(bent[at], start=bent[at].start + 1)
        case "uneven":
            bent[at] = replace(bent[at], logprobs=bent[at].logprobs[:-1])
        case "foreign":
            bent.append(replace(bent[-1], trajectory="j1-9-9", start=sum(len(c.tokens) for c in bent)))
        case "early end":
            bent.append(replace(bent[-1], start=sum(len(c.tokens) for c in bent)))
        case "no end":
            bent[-1] = replace(bent[-1], finish=None)
        case _:
            bent[at] = replace(bent[at], tokens=(), logprobs=())
    with pytest.raises(BadChunks):
        fold(bent, "w0")


@given(histories())
def test_a_version_that_falls_is_no_trajectory(chunks: list[Chunk]) -> None:
    newer = replace(chunks[0], version=VersionId(9, 9))
    rest = [replace(c, start=c.start + len(newer.tokens)) for c in chunks]
    with pytest.raises(BadTrajectory, match="version falls"):
        told(fold([replace(newer, finish=None), *rest], "w0"))


def test_expert_ids_must_cover_every_fed_token() -> None:
    chunk = Chunk(
        trajectory=ITEM.trajectory,
        start=0,
        tokens=(4, 5),
        logprobs=(-1.0, -2.0),
        version=VersionId(0, 0),
        digest="d",
        began=0.0,
        ended=1.0,
        finish="stop",
        experts=Experts(bytes(3 * 2 * 2), (3, 2, 2), "u1"),
    )
    assert told(fold([chunk], "w0")).expert_shape == (3, 2, 2)
    short = replace(chunk, experts=Experts(bytes(2 * 2 * 2), (2, 2, 2), "u1"))
    with pytest.raises(BadTrajectory, match="expert ids for 2 tokens, expected 3"):
        told(fold([short], "w0"))

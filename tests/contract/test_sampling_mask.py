"""The sampling mask of a record: through the stream and a segment as it was, and refused where it cannot be true."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec
import pytest
from record_parts import with_part

from syncline.contract.recorded import SamplingMask, joined, mask_of
from syncline.contract.token_path import (
    BadTrajectory,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    check,
)
from syncline.contract.trajectory_wire import decode, encode
from syncline.contract.version_path import VersionId
from syncline.runtime import segments

MASK = mask_of([[8, 3], [5], [9, 1, 2]])


def record(mask: SamplingMask | None = MASK, logprob: str = "processed") -> Trajectory:
    convention = msgspec.convert({"logprob": logprob, "top_k": 3}, SamplingConvention)
    return Trajectory(
        job="j0",
        trajectory="j0-0-0",
        group=0,
        index=0,
        attempt=1,
        prompt=0,
        tokens=array("i", [7, 8, 5, 9]),
        segments=(Segment(kind="prompt", start=0, end=1), Segment(kind="sampled", start=1, end=4)),
        logprobs=array("f", [-0.5, 0.0, -1.0]),
        loss_mask=b"\1\1\1",
        spans=(VersionSpan(start=0, end=3, version=VersionId(0, 1), digest="d", worker="w0"),),
        convention=convention,
        finish="stop",
        contract="c",
        text="x",
        traceparent="",
        timing=Timing(started=0.0, queued=0.0, prefill=0.0, decode=0.0),
        mask=mask,
    )


@pytest.mark.parametrize("mask", [MASK, None])
def test_it_comes_back_as_it_was(tmp_path: Path, mask: SamplingMask | None) -> None:
    one = record(mask)
    assert decode(encode(one)) == one
    row = segments.SegmentRow(
        trajectory=one, reward=None, use="train", why="", lag=0, advantage=1.0, used_mask=b"\1\1\1"
    )
    made = segments.Segment(
        job="j0", update=1, base=VersionId(0, 0), contract="c", spec_hash="s", members=(row,)
    )
    assert segments.read(segments.write(tmp_path, made)).rows == (row,)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (mask_of([[8, 3], [5]]), "for 2 of 3"),
        (mask_of([[8, 3], [5], [1, 2]]), "token 2 is 9"),
        (mask_of([[8, 3, 3], [5], [9]]), "twice"),
        (mask_of([[8, -3], [5], [9]]), "below 0"),
        (SamplingMask(array("i", [2, 0, 4]), MASK.ids), "do not add up"),
        (SamplingMask(array("i", [2, 1, 2]), MASK.ids), "do not add up"),
    ],
)
def test_a_mask_that_cannot_be_true_is_refused(mask: SamplingMask, says: str) -> None:
    with pytest.raises(BadTrajectory, match=says):
        check(record(mask))


def test_a_mask_belongs_to_log_probs_after_the_cut() -> None:
    with pytest.raises(BadTrajectory, match="before the cut"):
        check(record(logprob="scaled"))


@pytest.mark.parametrize(
    ("which", "part", "says"),
    [("mask_sizes", b"", "mask"), ("mask_ids", b"\0", "mask of 1 bytes")],
)
def test_half_a_mask_is_none(which: str, part: bytes, says: str) -> None:
    with pytest.raises(BadTrajectory, match=says):
        decode(with_part(encode(record()), which, part))
    with pytest.raises(BadTrajectory, match="half a sampling mask"):
        decode(with_part(encode(record()), which, None))


def test_masks_join_in_order_or_not_at_all() -> None:
    assert joined([mask_of([[8, 3]]), mask_of([[5], [9, 1, 2]])]) == MASK
    assert joined([None, None]) is None
    with pytest.raises(ValueError, match="some of the tokens"):
        joined([MASK, None])

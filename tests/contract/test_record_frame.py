"""How a record lies in its stream entry, which other programs may read; and what is no record."""

from __future__ import annotations

import struct
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_parts import NAMES, parts, with_part

from syncline.contract.token_path import (
    BadTrajectory,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
)
from syncline.contract.trajectory_wire import decode, encode
from syncline.contract.version_path import VersionId

RECORD = Trajectory(
    job="j0",
    trajectory="j0-3-1",
    group=3,
    index=1,
    attempt=2,
    prompt=5,
    tokens=array("i", [7, 8, -1, 70_000]),
    segments=(Segment(kind="prompt", start=0, end=1), Segment(kind="sampled", start=1, end=4)),
    logprobs=array("f", [-0.5, 0.0, -1.25]),
    loss_mask=b"\1\0\1",
    spans=(VersionSpan(start=0, end=3, version=VersionId(0, 1), digest="d", worker="w0"),),
    convention=SamplingConvention(),
    finish="stop",
    contract="c",
    text="x",
    traceparent="",
    timing=Timing(started=0.0, queued=0.0, prefill=0.0, decode=0.0),
    expert_ids=bytes(range(12)),
    expert_shape=(3, 2, 2),
    expert_dtype="u1",
)
WHOLE = encode(RECORD)


def test_one_field_holds_all_of_it() -> None:
    assert list(WHOLE) == [b"m"]
    whole = parts(WHOLE)
    assert [whole[name] for name in ("job", "trajectory", "group", "index")] == ["j0", "j0-3-1", 3, 1]
    assert struct.unpack("<4i", whole["tokens"]) == (7, 8, -1, 70_000)
    assert struct.unpack("<3f", whole["logprobs"]) == (-0.5, 0.0, -1.25)
    assert (whole["loss_mask"], whole["expert_ids"]) == (b"\1\0\1", bytes(range(12)))
    assert (whole["mask_sizes"], whole["mask_ids"]) == (None, None)
    assert decode(WHOLE) == RECORD


def test_it_names_its_parts_in_order() -> None:
    """A part that is added or moved is another shape: decision 0023 says what that takes."""
    assert len(NAMES) == 23
    for name, value in msgspec.structs.asdict(RECORD).items():
        if name not in ("mask", "tokens", "logprobs", "loss_mask", "expert_ids"):
            assert msgspec.json.encode(parts(WHOLE)[name]) == msgspec.json.encode(value)


@given(st.integers(0, len(WHOLE[b"m"]) - 1))
def test_a_part_of_it_is_no_record(length: int) -> None:
    with pytest.raises(BadTrajectory):
        decode({b"m": WHOLE[b"m"][:length]})


@pytest.mark.parametrize(
    ("name", "part", "says"),
    [
        ("tokens", None, "trajectory record: .*19"),
        ("logprobs", b"\0" * 7, "j0-3-1: log-probs of 7 bytes"),
        ("tokens", b"\0" * 17, "j0-3-1: tokens of 17 bytes"),
        ("expert_ids", None, "come together"),
        ("group", "3", "trajectory record"),
        ("loss_mask", b"\1", "loss mask of 1"),
    ],
)
def test_what_is_wrong_is_named(name: str, part: object, says: str) -> None:
    with pytest.raises(BadTrajectory, match=says):
        decode(with_part(WHOLE, name, part))


def test_a_part_too_many_or_too_few_is_refused() -> None:
    whole = list(parts(WHOLE).values())
    for wrong in ([*whole, 1], whole[:-1]):
        with pytest.raises(BadTrajectory, match="trajectory record"):
            decode({b"m": msgspec.msgpack.encode(wrong)})


def test_an_entry_of_other_fields_is_refused_by_their_names() -> None:
    with pytest.raises(BadTrajectory, match=r"\['h', 't'\], without 'm'"):
        decode({b"t": b"", b"h": b""})

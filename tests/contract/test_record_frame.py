"""How a record lies in its stream entry, which other programs may read; and what is no record."""

from __future__ import annotations

import struct
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_parts import EXPERT_IDS, HEADER, LOGPROBS, TOKENS, parts, with_part

from syncline.contract.token_path import (
    BadTrajectory,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    decode,
    encode,
    pieces,
)
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


def test_one_field_holds_sizes_header_and_arrays() -> None:
    assert list(WHOLE) == [b"r"]
    sizes = struct.unpack_from("<7I", WHOLE[b"r"])
    assert sizes[1:] == (16, 12, 3, 12, 2**32 - 1, 2**32 - 1)
    body = WHOLE[b"r"][28 + sizes[0] :]
    assert struct.unpack_from("<4i3f", body) == (7, 8, -1, 70_000, -0.5, 0.0, -1.25)
    assert body[28:] == b"\1\0\1" + bytes(range(12))
    header = msgspec.msgpack.decode(WHOLE[b"r"][28 : 28 + sizes[0]])
    assert header[:6] == ["j0", "j0-3-1", 3, 1, 2, 5]
    assert b"".join(pieces(RECORD)) == WHOLE[b"r"]
    assert decode(WHOLE) == RECORD


@given(st.integers(0, len(WHOLE[b"r"]) - 1))
def test_a_part_of_it_is_no_record(length: int) -> None:
    with pytest.raises(BadTrajectory):
        decode({b"r": WHOLE[b"r"][:length]})


@given(st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_sizes_that_do_not_fill_it_are_refused(which: int, size: int) -> None:
    sizes = list(struct.unpack_from("<7I", WHOLE[b"r"]))
    if sizes[which] == size:
        return
    sizes[which] = size
    with pytest.raises(BadTrajectory):
        decode({b"r": struct.pack("<7I", *sizes) + WHOLE[b"r"][28:]})


@pytest.mark.parametrize(
    ("which", "part", "says"),
    [
        (HEADER, None, "without header"),
        (TOKENS, None, "without header, tokens"),
        (LOGPROBS, b"\0" * 7, "j0-3-1: log-probs of 7 bytes"),
        (TOKENS, b"\0" * 17, "j0-3-1: tokens of 17 bytes"),
        (EXPERT_IDS, None, "come together"),
        (HEADER, b"\xc1", "trajectory header"),
    ],
)
def test_what_is_wrong_is_named(which: int, part: bytes | None, says: str) -> None:
    with pytest.raises(BadTrajectory, match=says):
        decode(with_part(WHOLE, which, part))


def test_a_header_with_a_field_too_many_or_too_few_is_refused() -> None:
    header = msgspec.msgpack.decode(parts(WHOLE)[HEADER] or b"")
    for wrong in ([*header, 1], header[:-1]):
        with pytest.raises(BadTrajectory, match="trajectory header"):
            decode(with_part(WHOLE, HEADER, msgspec.msgpack.encode(wrong)))


def test_an_entry_of_other_fields_is_refused_by_their_names() -> None:
    with pytest.raises(BadTrajectory, match=r"\['h', 't'\], without 'r'"):
        decode({b"t": b"", b"h": b""})

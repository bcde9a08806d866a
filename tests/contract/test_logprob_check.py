"""Which log-probs a record may hold: one rule of one number, whatever decides it for thousands at once."""

from __future__ import annotations

import math
import re
import struct
import sys
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_parts import with_part

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

LAW = (-1e30, 1e-5)  # above the first, at most the second
EDGES = [
    *(0.0, -0.0, 1e-45, -1e-45, 1.1754943508222875e-38, -0.5, -1e4, 1.0, 3.4028234663852886e38),
    *(math.nan, -math.nan, math.inf, -math.inf),
]
NAN_BITS = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF]


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def around(value: float) -> list[float]:
    """The float32 nearest to `value`, and the four on either side of it."""
    return [float_of(bits_of(value) + step) for step in range(-4, 5)]


def record(logprobs: array[float]) -> Trajectory:
    sampled = len(logprobs)
    return Trajectory(
        job="j0123456789",
        trajectory="j0123456789-0-0",
        group=0,
        index=0,
        attempt=1,
        prompt=0,
        tokens=array("i", [7] + [8] * sampled),
        segments=(
            Segment(kind="prompt", start=0, end=1),
            Segment(kind="sampled", start=1, end=1 + sampled),
        ),
        logprobs=logprobs,
        loss_mask=b"\1" * sampled,
        spans=(VersionSpan(start=0, end=sampled, version=VersionId(0, 0), digest="d", worker="w0"),),
        convention=SamplingConvention(),
        finish="stop",
        contract="c",
        text="x",
        traceparent="",
        timing=Timing(started=0.0, queued=0.0, prefill=0.0, decode=0.0),
    )


def told(logprobs: array[float]) -> str:
    """What the rule says of each number by itself: the complaint about the first that breaks it, "" if none does."""
    for token, value in enumerate(logprobs):
        if not LAW[0] < value <= LAW[1]:
            return f"trajectory j0123456789-0-0: log-prob {value} at sampled token {token}"
    return ""


def agrees(logprobs: array[float]) -> None:
    made, complaint = record(logprobs), told(logprobs)
    if not complaint:
        assert check(made) is made
        assert decode(encode(made)).logprobs.tobytes() == logprobs.tobytes()
        return
    with pytest.raises(BadTrajectory, match=f"^{re.escape(complaint)}$"):
        check(made)
    with pytest.raises(BadTrajectory, match=f"^{re.escape(complaint)}$"):
        encode(made)
    whole = encode(record(array("f", [-1.0] * len(logprobs))))  # one that somebody else has written
    with pytest.raises(BadTrajectory, match=f"^{re.escape(complaint)}$"):
        decode(with_part(whole, "logprobs", logprobs.tobytes()))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_any_bits(bits: list[int]) -> None:
    agrees(array("f", b"".join(struct.pack("=I", one) for one in bits)))


@given(
    st.lists(st.floats(-50.0, 0.0, width=32), min_size=1, max_size=40),
    st.sampled_from([*EDGES, *around(LAW[0]), *around(LAW[1])]),
    st.integers(0, 39),
)
def test_one_odd_number_among_usual_ones(usual: list[float], odd: float, place: int) -> None:
    values = array("f", usual)
    values[place % len(values)] = odd
    agrees(values)


@pytest.mark.parametrize("bits", NAN_BITS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_number_at_all(bits: int, place: int) -> None:
    body = [struct.pack("=f", -1.0)] * 3
    body[place] = struct.pack("=I", bits)
    values = array("f", b"".join(body))
    assert math.isnan(values[place])
    agrees(values)


def test_every_top_half_with_least_and_most_below_it() -> None:
    """All 65,536 signs, exponents and upper mantissas: the law by one number each, with either end of the rest."""
    order = 1 if sys.byteorder == "little" else -1
    for top in range(65536):
        values = array("f", b"".join(struct.pack("<I", top << 16 | low)[::order] for low in (0, 0xFFFF)))
        allowed = [LAW[0] < value <= LAW[1] for value in values]
        made = msgspec.structs.replace(_TWO, logprobs=values)
        if all(allowed):
            check(made)
        else:
            token = allowed.index(False)
            with pytest.raises(
                BadTrajectory, match=re.escape(f"log-prob {values[token]} at sampled token {token}")
            ):
                check(made)


def test_many_tiny_positive_ones_are_allowed() -> None:
    """Rounding may leave every log-prob of a long answer a little above 0."""
    agrees(array("f", [1e-5] * 200_000))


_TWO = record(array("f", [-1.0, -1.0]))

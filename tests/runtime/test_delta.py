"""A delta makes the new bytes to the bit, is smaller than they are, and whatever was done to it makes no others."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.runtime import delta
from syncline.runtime.delta import CHUNK, WORDS, BadDelta, Delta, OtherBase, apply, encode, header

ITEMSIZES = st.sampled_from(sorted(WORDS))
HEADER = 85  # bytes


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _weights(seed: int, nbytes: int) -> bytes:
    """BF16 values as a weight's, N(0, 0.02)."""
    values = np.random.default_rng(seed).normal(0, 0.02, nbytes // 2).astype("<f4")
    return bytes((values.view("<u4") >> 16).astype("<u2").data)


def _stepped(old: bytes, share: float, seed: int, itemsize: int = 2) -> bytes:
    """`old` with a share of its elements one up or down: what a small step does to BF16."""
    rng = np.random.default_rng(seed)
    words = np.frombuffer(old, WORDS[itemsize]).copy()
    moved = rng.random(len(words)) < share
    steps = rng.choice(np.array([1, -1]), len(words)).astype(WORDS[itemsize])
    words[moved] += steps[moved]
    return bytes(words.data)


def _delta(old: bytes, new: bytes, itemsize: int = 2) -> Delta:
    made = encode(old, new, itemsize)
    assert made is not None
    return made


# ---- any two tensors
@st.composite
def _pairs(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """Two byte strings of one length that differ in some elements, and an itemsize."""
    itemsize = draw(ITEMSIZES)
    count = draw(st.integers(0, 600))
    old = draw(st.binary(min_size=count * itemsize, max_size=count * itemsize))
    new = bytearray(old)
    for at in draw(st.lists(st.integers(0, count - 1), max_size=60)) if count else ():
        new[at * itemsize : (at + 1) * itemsize] = draw(st.binary(min_size=itemsize, max_size=itemsize))
    return old, bytes(new), itemsize


@settings(deadline=None, max_examples=300)
@given(_pairs())
def test_any_delta_makes_the_new_bytes_and_is_smaller(pair: tuple[bytes, bytes, int]) -> None:
    old, new, itemsize = pair
    made = encode(old, new, itemsize)
    if made is None:
        return
    assert len(made.data) < len(new)
    assert apply(old, made.data) == new
    changed = np.count_nonzero(np.frombuffer(old, WORDS[itemsize]) != np.frombuffer(new, WORDS[itemsize]))
    assert made.header == header(made.data)
    assert made.header == delta.Header(
        itemsize=itemsize, changed=int(changed), size=len(new), old=_sha(old), new=_sha(new)
    )
    assert encode(old, new, itemsize, (_sha(old), _sha(new))) == made


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    words=st.integers(1, 3 * CHUNK // 8),
    share=st.sampled_from([0.0, 1e-6, 1e-4, 3e-3, 0.03, 0.2, 0.3, 0.6, 1.0]),
    itemsize=ITEMSIZES,
)
def test_tensors_of_several_chunks(seed: int, words: int, share: float, itemsize: int) -> None:
    old = _weights(seed, 8 * words)
    new = _stepped(old, share, seed, itemsize)
    made = encode(old, new, itemsize)
    if made is None:
        assert share > 0.2 or words < 100, "a small step of large tensors is worth a delta"
        return
    assert len(made.data) < len(new)
    assert apply(old, made.data, made.header.old) == new


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=400), st.binary(max_size=400), ITEMSIZES)
def test_unrelated_bytes_are_sent_whole_or_right(old: bytes, new: bytes, itemsize: int) -> None:
    if len(old) != len(new):
        assert encode(old, new, itemsize) is None
    elif len(new) % itemsize:
        with pytest.raises(ValueError, match=f"itemsize {itemsize} does not divide {len(new)} bytes"):
            encode(old, new, itemsize)
    elif (made := encode(old, new, itemsize)) is not None:
        assert apply(old, made.data) == new


def test_random_bytes_have_no_delta() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.bytes(CHUNK + 64), rng.bytes(CHUNK + 64)
    assert encode(old, new, 2) is None


def test_an_itemsize_of_three_is_refused() -> None:
    with pytest.raises(ValueError, match="itemsize 3 is none of 1, 2, 4, 8"):
        encode(b"abc", b"abd", 3)


def test_kinds_of_buffers_and_shapes() -> None:
    """A mapped blob, an array's memory, a slice: what is contiguous is taken as it lies."""
    old = _weights(1, 8192)
    new = _stepped(old, 0.03, 1)
    shaped = np.frombuffer(new, "<u2").reshape(64, 64)
    made = encode(memoryview(old), shaped.data, 2)
    assert made is not None
    assert apply(bytearray(old), memoryview(b"x" + made.data)[1:]) == new
    assert encode(np.empty((0, 64), "<u2").data, b"", 2) is None


@pytest.mark.parametrize(
    ("share", "largest"), [(0.0, 0.001), (0.003, 0.005), (0.03, 0.03), (0.3, 0.12), (0.6, 0.175), (1.0, 0.17)]
)
def test_small_steps_make_small_deltas(share: float, largest: float) -> None:
    """Places and a few bits each: about 9 bits at 3 %. At 60 % places cost more than every element's XOR (0.182)."""
    old = _weights(2, 4 * CHUNK)
    made = _delta(old, _stepped(old, share, 2))
    assert len(made.data) < largest * len(old)


def test_changes_side_by_side_cost_no_places() -> None:
    """Rows of an embedding that were seen: everything in them changes, and nothing elsewhere."""
    old = _weights(3, CHUNK)
    rows = slice(CHUNK // 4, CHUNK // 4 + 4096)
    new = bytearray(old)
    new[rows] = _stepped(old[rows], 1.0, 3)
    assert len(_delta(old, bytes(new)).data) < 4096 // 4 + 200


# ---- what was done to it
SMALL = {
    "sparse": (_weights(4, 2048), _stepped(_weights(4, 2048), 0.05, 4)),
    "dense": (_weights(5, 512), _stepped(_weights(5, 512), 0.9, 5)),
    "equal": (_weights(6, 512), _weights(6, 512)),
}


@pytest.mark.parametrize("kind", SMALL)
def test_every_flipped_bit_is_refused_or_changes_nothing(kind: str) -> None:
    old, new = SMALL[kind]
    made = _delta(old, new).data
    refused = 0
    for bit in range(8 * len(made)):
        bent = bytearray(made)
        bent[bit // 8] ^= 1 << bit % 8
        try:
            assert apply(old, bent) == new, f"bit {bit} makes other bytes"
        except BadDelta:
            refused += 1
    assert refused > 0.9 * 8 * len(made)
    assert refused >= 8 * HEADER, "no bit of the header is without a meaning"


@settings(deadline=None, max_examples=150)
@given(data=st.data(), itemsize=ITEMSIZES)
def test_bent_deltas_of_several_chunks(data: st.DataObject, itemsize: int) -> None:
    old = _weights(7, CHUNK + 4096)
    new = bytearray(_stepped(old, 1e-4, 7, itemsize))
    new[CHUNK : CHUNK + 512] = bytes(512)
    made = bytearray(_delta(old, bytes(new), itemsize).data)
    at = data.draw(st.integers(0, len(made) - 1))
    end = data.draw(st.integers(at, min(at + 16, len(made))))
    made[at:end] = data.draw(st.binary(max_size=16))
    with suppress(BadDelta):
        assert apply(old, made) == new


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_any_bytes_behind_a_header_are_refused_or_right(body: bytes) -> None:
    old, new = SMALL["sparse"]
    forged = _delta(old, new).data[:HEADER] + body
    with suppress(BadDelta):
        assert apply(old, forged) == new


@pytest.mark.parametrize("kind", SMALL)
def test_every_truncation_and_a_longer_one_are_refused(kind: str) -> None:
    old, new = SMALL[kind]
    made = _delta(old, new).data
    for length in range(len(made)):
        with pytest.raises(BadDelta, match="the delta ends after"):
            apply(old, made[:length])
    with pytest.raises(BadDelta, match="3 bytes follow the delta's last chunk"):
        apply(old, made + b"\0\0\0")


def test_another_base_is_refused() -> None:
    old, new = SMALL["sparse"]
    made = _delta(old, new)
    other = bytes([old[0] ^ 1]) + old[1:]
    with pytest.raises(OtherBase, match=f"digest {_sha(old)}, and these have {_sha(other)}"):
        apply(other, made.data)
    with pytest.raises(OtherBase, match=f"{len(old)} bytes, and there are {len(old) - 2}"):
        apply(old[2:], made.data)
    with pytest.raises(OtherBase, match="these have 00ff"):
        apply(old, made.data, "00ff")


def test_a_wrong_word_for_the_base_makes_no_wrong_bytes() -> None:
    """The caller says it checked the old bytes, and did not."""
    old, new = SMALL["sparse"]
    made = _delta(old, new)
    with pytest.raises(BadDelta, match="the delta makes bytes with digest"):
        apply(bytes([old[0] ^ 1]) + old[1:], made.data, made.header.old)


def test_wrong_digests_make_a_delta_that_is_refused() -> None:
    old, new = SMALL["sparse"]
    made = encode(old, new, 2, (_sha(old), _sha(old)))
    assert made is not None
    with pytest.raises(BadDelta, match=f"digest {_sha(new)}, its header says {_sha(old)}"):
        apply(old, made.data)


# ---- deltas that somebody made on purpose
def _forged(size: int, *chunks: bytes, changed: int = 0, itemsize: int = 1) -> bytes:
    sums = hashlib.sha256(bytes(size)).digest() if size < 1 << 30 else bytes(32)
    return struct.pack("<4sBQQ32s32s", b"SLD1", itemsize, changed, size, sums, sums) + b"".join(chunks)


def _frame(content: bytes, sized: bool = True) -> bytes:
    made = zstandard.ZstdCompressor(level=1, write_content_size=sized).compress(content)
    return struct.pack("<I", len(made)) + made


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (b"\3", "a chunk of unknown kind 3"),
        (b"\1" + _frame(b"\x64") + _frame(b"\1"), "index 100 is out of range in a chunk of 100 elements"),
        (b"\1" + _frame(b"\x63\0") + _frame(b"\1\1"), "index 100 is out of range"),
        (b"\1" + _frame(b"\xff\0") + _frame(b"\1"), "index 255 is out of range"),
        (b"\1" + _frame(bytes(101)), "gaps of 101 bytes, where 1 to 100 can be"),
        (b"\1" + _frame(b""), "gaps of 0 bytes"),
        (
            b"\1" + _frame(b"\0") + _frame(b"\1\1"),
            "byte 0 of 1 changed elements of 2 bytes, where 1 to 1 can be",
        ),
        (b"\2" + _frame(bytes(99)), "byte 0 of 100 changed elements of 99 bytes"),
        (b"\2" + _frame(bytes(100), sized=False), "where 100 to 100 can be"),
        (b"\2" + struct.pack("<I", 4) + b"none", "byte 0 of 100 changed elements: "),
        (b"\2" + struct.pack("<I", 2**32 - 1), "the delta ends after 90 bytes, 4294967295 too early"),
        (b"\1" + _frame(b"\0") + _frame(b"\0"), "the delta changes 1 elements, its header says 0"),
        (b"\2" + _frame(b"\1" + bytes(99)), "the delta changes 1 elements, its header says 0"),
    ],
)
def test_forged_chunks_are_refused_by_name(chunk: bytes, message: str) -> None:
    assert apply(bytes(100), _forged(100, b"\0")) == bytes(100)
    with pytest.raises(BadDelta, match=message):
        apply(bytes(100), _forged(100, chunk))


def test_two_frames_in_the_place_of_one_are_refused() -> None:
    one = zstandard.ZstdCompressor().compress(bytes(100))
    with pytest.raises(BadDelta, match="byte 0 of 100 changed elements"):
        apply(bytes(100), _forged(100, b"\2", struct.pack("<I", 2 * len(one)), one, one))


@pytest.mark.parametrize("itemsize", [0, 3, 255])
def test_an_impossible_header_is_refused(itemsize: int) -> None:
    with pytest.raises(BadDelta, match=f"of 100 bytes in elements of {itemsize}"):
        apply(bytes(100), _forged(100, b"\0", itemsize=itemsize))
    with pytest.raises(BadDelta, match="of 100 bytes in elements of 8"):
        header(_forged(100, itemsize=8))
    with pytest.raises(BadDelta, match=r"a delta begins with b'SLD1', this with b'SLD2'"):
        header(_forged(100).replace(b"SLD1", b"SLD2"))


def test_a_bomb_takes_no_memory() -> None:
    """64 MiB in a frame of 2 KB, a tensor of 2**60 bytes: both are known to be impossible before they are made."""
    bomb = _frame(bytes(64 << 20))
    assert len(bomb) < 8192
    tracemalloc.start()
    try:
        for forged in (_forged(100, b"\1" + bomb), _forged(100, b"\2" + bomb)):
            with pytest.raises(BadDelta, match=f"of {64 << 20} bytes, where"):
                apply(bytes(100), forged)
        with pytest.raises(OtherBase, match=f"starts from {1 << 60} bytes, and there are 100"):
            apply(bytes(100), _forged(1 << 60))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_memory_is_the_result_and_a_few_chunks() -> None:
    old = _weights(8, 24 * CHUNK)
    new = _stepped(old, 0.03, 8)
    tracemalloc.start()
    try:
        made = _delta(old, new).data
        assert tracemalloc.get_traced_memory()[1] < 12 * CHUNK + 3 * len(made)
        tracemalloc.reset_peak()
        assert apply(old, made) == new
        assert tracemalloc.get_traced_memory()[1] < len(old) + 12 * CHUNK + len(made)
    finally:
        tracemalloc.stop()


def test_every_dtype_of_a_version_has_a_grain() -> None:
    assert set(delta.GRAIN.values()) <= set(WORDS)
    assert {"BF16", "F32", "F8_E4M3", "U8", "I32", "I64"} <= set(delta.GRAIN)

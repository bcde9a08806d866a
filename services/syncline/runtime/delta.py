"""Deltas: what turns one version's bytes of a tensor into another's, bit-exact, where that is smaller than the tensor.

Pure functions of bytes; who writes deltas and who asks for them is not known here. All numbers are little-endian.

    header   "SLD1", itemsize u8, changed u64 (elements), size u64 (bytes of the tensor),
             sha256 of the old bytes, sha256 of the new bytes
    chunks   one for each `CHUNK` bytes of the tensor, the last shorter: a kind u8, then its frames
        equal    no frames
        sparse   gaps between changed elements, then the XOR of each changed element, a frame per byte of it
        dense    the XOR of every element, a frame per byte of it
    frame    length u32, then one Zstandard frame that states its content's size

A gap is a byte: b < 255 passes over b equal elements to a changed one, 255 passes over 255 equal ones and goes on. An
element's bytes lie apart ("planes") because small steps change low bytes alone.

Memory beyond the two tensors: some chunks, and the delta. `apply` allocates nothing of a size that the delta alone
states: tensor and chunks have the old bytes' size, a frame's content what its place in a chunk allows.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import msgspec
import numpy as np
import zstandard

CHUNK = 1 << 20  # bytes of a tensor, a multiple of every itemsize
WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
GRAIN = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "I16": 2,
    "I32": 1,  # eight INT4 codes: a byte of them changes alone
    "I64": 8,
}
"""`itemsize` by safetensors dtype: the bytes that change together."""

_HEADER = struct.Struct("<4sBQQ32s32s")
_LENGTH = struct.Struct("<I")
_MAGIC = b"SLD1"
_EQUAL, _SPARSE, _DENSE = range(3)
_LEVEL = 1  # of Zstandard: what is left after gaps and planes has no long matches, so that more effort finds little
_SKIP = 255
_TRY_DENSE = (
    4  # below one changed element in four, gaps cost less than the bit per element that dense planes do
)

Buffer = bytes | bytearray | memoryview
Array = np.ndarray[Any, np.dtype[Any]]


class BadDelta(ValueError):
    """A delta that is truncated, altered or malformed, or does not make the bytes that it says."""


class OtherBase(BadDelta):
    """A delta that starts from other bytes than those that it is to be applied to."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a delta says of itself. Not to be believed before `apply` has returned."""

    itemsize: int  # bytes of an element: 1, 2, 4, 8
    changed: int  # elements that differ
    size: int  # bytes of the tensor, old and new
    old: str  # sha256 hex of the bytes that it starts from
    new: str  # sha256 hex of the bytes that it makes


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A delta with its header; `data` is all of it, header included, and smaller than the tensor."""

    header: Header
    data: bytes


# ---- making one ----
def encode(old: Buffer, new: Buffer, itemsize: int, digests: tuple[str, str] | None = None) -> Delta | None:
    """The delta from `old` to `new`. None: it would not be smaller than `new`, or the two differ in size.

    itemsize  bytes that change together (`GRAIN`); any that divides the size gives a right delta
    digests   sha256 hex of `old` and of `new`, where the caller has them; wrong ones make a delta that `apply` refuses

    Equal input gives equal bytes under one release of Zstandard. Raises `ValueError` for an itemsize that is none of
    1, 2, 4, 8 or does not divide the size.
    """
    before, after = _raw(old), _raw(new)
    if itemsize not in WORDS:
        raise ValueError(f"itemsize {itemsize} is none of {', '.join(map(str, WORDS))}")
    if before.nbytes != after.nbytes:
        return None
    if after.nbytes % itemsize:
        raise ValueError(f"itemsize {itemsize} does not divide {after.nbytes} bytes")
    squeeze = zstandard.ZstdCompressor(level=_LEVEL)
    pieces: list[bytes] = []
    length, changed = _HEADER.size, 0
    for start in range(0, after.nbytes, CHUNK):
        words = [np.frombuffer(v[start : start + CHUNK], WORDS[itemsize]) for v in (before, after)]
        count, chunk = _chunk(words[0] ^ words[1], squeeze)
        changed += count
        length += len(chunk)
        if length >= after.nbytes:
            return None
        pieces.append(chunk)
    if length >= after.nbytes:
        return None
    sums = digests or (_sha256(before), _sha256(after))
    header = Header(itemsize=itemsize, changed=changed, size=after.nbytes, old=sums[0], new=sums[1])
    return Delta(header=header, data=b"".join([_packed(header), *pieces]))


def changed(old: Buffer, new: Buffer, itemsize: int) -> int:
    """How many elements differ, of two tensors of one size: what `Header.changed` says, without a delta."""
    before, after = _raw(old), _raw(new)
    count = 0
    for start in range(0, after.nbytes, CHUNK):
        words = [np.frombuffer(v[start : start + CHUNK], WORDS[itemsize]) for v in (before, after)]
        count += int(np.count_nonzero(words[0] != words[1]))
    return count


def _chunk(xor: Array, squeeze: zstandard.ZstdCompressor) -> tuple[int, bytes]:
    """How many elements of a chunk changed, and the chunk, of the kind that is smallest."""
    at = np.flatnonzero(xor)
    if not len(at):
        return 0, bytes([_EQUAL])
    sparse = b"".join([bytes([_SPARSE]), _frame(_gaps(at), squeeze), *_planes(xor[at], squeeze)])
    if len(at) * _TRY_DENSE < len(xor):
        return len(at), sparse
    dense = b"".join([bytes([_DENSE]), *_planes(xor, squeeze)])
    return len(at), min(sparse, dense, key=len)


def _gaps(at: Array) -> Array:
    """Ascending indices as bytes of gaps."""
    between = np.diff(at, prepend=-1) - 1
    skips = between // _SKIP
    gaps = np.full(len(at) + int(skips.sum()), _SKIP, np.uint8)
    gaps[np.cumsum(skips + 1) - 1] = between % _SKIP
    return gaps


def _planes(words: Array, squeeze: zstandard.ZstdCompressor) -> list[bytes]:
    planes = words.view(np.uint8).reshape(-1, words.itemsize).T
    return [_frame(np.ascontiguousarray(plane), squeeze) for plane in planes]


def _frame(content: Array, squeeze: zstandard.ZstdCompressor) -> bytes:
    made = squeeze.compress(content.data)
    return _LENGTH.pack(len(made)) + made


# ---- using one ----
def apply(old: Buffer, delta: Buffer, base: str = "") -> bytearray:
    """The new bytes: `old` with `delta` applied, and hashed.

    base    sha256 hex of `old` where the caller has just checked it (`BlobStore.read` does); "": it is hashed here

    Raises `OtherBase` if `old` are not the bytes that the delta starts from, `BadDelta` for anything else that does not
    end in exactly the bytes whose digest the delta states.
    """
    before, coded = _raw(old), _raw(delta)
    head = header(coded)
    if head.size != before.nbytes:
        raise OtherBase(f"the delta starts from {head.size} bytes, and there are {before.nbytes}")
    found = base or _sha256(before)
    if head.old != found:
        raise OtherBase(f"the delta starts from bytes with digest {head.old}, and these have {found}")
    made = bytearray(before)
    frames = _Frames(coded)
    words = np.frombuffer(made, WORDS[head.itemsize])
    step = CHUNK // head.itemsize
    changed = sum(_patch(words[at : at + step], frames) for at in range(0, len(words), step))
    if frames.left:
        raise BadDelta(f"{frames.left} bytes follow the delta's last chunk")
    if changed != head.changed:
        raise BadDelta(f"the delta changes {changed} elements, its header says {head.changed}")
    found = _sha256(made)
    if found != head.new:
        raise BadDelta(f"the delta makes bytes with digest {found}, its header says {head.new}")
    return made


def header(delta: Buffer) -> Header:
    """The header of `delta`. Raises `BadDelta` for what is no delta or has an impossible header."""
    raw = _raw(delta)
    if raw.nbytes < _HEADER.size:
        raise BadDelta(f"the delta ends after {raw.nbytes} bytes, in its header")
    magic, itemsize, changed, size, old, new = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise BadDelta(f"a delta begins with {_MAGIC!r}, this with {magic!r}")
    if itemsize not in WORDS or size % itemsize:
        raise BadDelta(f"the delta is of {size} bytes in elements of {itemsize}")
    return Header(itemsize=itemsize, changed=changed, size=size, old=old.hex(), new=new.hex())


class _Frames:
    """What is left of a delta behind its header, read from front to back."""

    def __init__(self, raw: memoryview) -> None:
        self._raw = raw
        self._at = _HEADER.size
        self._expand = zstandard.ZstdDecompressor(max_window_size=CHUNK)

    @property
    def left(self) -> int:
        return self._raw.nbytes - self._at

    def take(self, count: int) -> memoryview:
        """The next `count` bytes."""
        if count > self.left:
            raise BadDelta(f"the delta ends after {self._raw.nbytes} bytes, {count - self.left} too early")
        self._at += count
        return self._raw[self._at - count : self._at]

    def content(self, low: int, high: int, what: str) -> Array:
        """The next frame's content, uint8 of `low` to `high` bytes, which is checked before room is made for it."""
        frame = self.take(_LENGTH.unpack(self.take(_LENGTH.size))[0])
        try:
            size = zstandard.get_frame_parameters(frame).content_size
            if not low <= size <= high:
                raise BadDelta(f"{what} of {size} bytes, where {low} to {high} can be")
            content = self._expand.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise BadDelta(f"{what}: {error}") from None
        if len(content) != size:
            raise BadDelta(f"{what} of {len(content)} bytes, whose frame says {size}")
        return np.frombuffer(content, np.uint8)


def _patch(words: Array, frames: _Frames) -> int:
    """Apply the next chunk to `words` in place. Returns how many elements changed."""
    kind = frames.take(1)[0]
    if kind == _EQUAL:
        return 0
    if kind == _SPARSE:
        at = _indices(frames.content(1, len(words) + len(words) // _SKIP, "gaps"), len(words))
        words[at] ^= _words(frames, len(at), words.dtype)
        return len(at)
    if kind == _DENSE:
        xor = _words(frames, len(words), words.dtype)
        words ^= xor
        return int(np.count_nonzero(xor))
    raise BadDelta(f"a chunk of unknown kind {kind}")


def _indices(gaps: Array, count: int) -> Array:
    """Inverse of `_gaps`, for a chunk of `count` elements."""
    hits = gaps != _SKIP
    ends = np.cumsum(gaps + hits.astype(np.int32), dtype=np.int32)  # at most 256 per byte of a chunk
    if ends[-1] > count:
        raise BadDelta(f"index {ends[-1] - 1} is out of range in a chunk of {count} elements")
    at: Array = ends[hits] - 1
    return at


def _words(frames: _Frames, count: int, dtype: np.dtype[Any]) -> Array:
    """`count` elements, from a frame per byte."""
    joined = np.empty((count, dtype.itemsize), np.uint8)
    for plane in range(dtype.itemsize):
        joined[:, plane] = frames.content(count, count, f"byte {plane} of {count} changed elements")
    return joined.reshape(-1).view(dtype)


# ---- both ----
def _raw(data: Buffer) -> memoryview:
    """C-contiguous `data` as bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a zero in its shape has no cast


def _sha256(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


def _packed(head: Header) -> bytes:
    sums = bytes.fromhex(head.old), bytes.fromhex(head.new)
    return _HEADER.pack(_MAGIC, head.itemsize, head.changed, head.size, *sums)

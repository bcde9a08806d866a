"""A trajectory as it lies in its stream: one message, checked when it is written and again when it is read."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal

import msgspec

from syncline.contract.recorded import SamplingMask
from syncline.contract.token_path import (
    BadTrajectory,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    check,
)
from syncline.contract.turns import Turn


class _Stored(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A trajectory as it lies in a stream: a msgpack array in this order, names as in `Trajectory`.

    Arrays are raw little-endian bytes: int32 tokens, float32 log-probs, int32 sizes and ids of the sampling mask.
    """

    job: str
    trajectory: str
    group: int
    index: int
    attempt: int
    prompt: int
    segments: tuple[Segment, ...]
    spans: tuple[VersionSpan, ...]
    convention: SamplingConvention
    finish: Literal["stop", "length"]
    contract: str
    text: str
    traceparent: str
    timing: Timing
    turns: tuple[Turn, ...]
    loss_mask: bytes
    expert_ids: bytes | None
    expert_shape: tuple[int, int, int] | None
    expert_dtype: Literal["u1", "u2"] | None
    tokens: memoryview
    logprobs: memoryview
    mask_sizes: memoryview | None
    mask_ids: memoryview | None


_STORED = msgspec.msgpack.Decoder(_Stored)
_SAME = _Stored.__struct_fields__[:-4]  # stored as they are
_SAME_OF = attrgetter(*_SAME)
RECORD = b"m"


def encode(trajectory: Trajectory) -> dict[bytes, bytes]:
    """The stream field of a checked record."""
    t = check(trajectory)
    mask = (None, None) if t.mask is None else (memoryview(t.mask.sizes), memoryview(t.mask.ids))
    arrays = memoryview(t.tokens), memoryview(t.logprobs), *mask
    return {RECORD: msgspec.msgpack.encode((*_SAME_OF(t), *arrays))}


def decode(fields: Mapping[bytes, bytes]) -> Trajectory:
    """Inverse of `encode`. Raises `BadTrajectory` for anything that is not a whole, consistent record."""
    body = fields.get(RECORD)
    if body is None:
        names = sorted(name.decode(errors="replace") for name in fields)
        raise BadTrajectory(f"trajectory entry of fields {names}, without {RECORD.decode()!r}")
    try:
        stored = _STORED.decode(body)
    except msgspec.MsgspecError as error:
        raise BadTrajectory(f"trajectory record: {error}") from None
    parts = msgspec.structs.asdict(stored)
    try:
        parts["mask"] = _mask(parts.pop("mask_sizes"), parts.pop("mask_ids"))
        parts["tokens"] = _array("tokens", "i", stored.tokens)
        parts["logprobs"] = _array("log-probs", "f", stored.logprobs)
    except ValueError as error:
        raise BadTrajectory(f"trajectory {stored.trajectory}: {error}") from None
    return check(Trajectory(**parts))


def _array(name: str, typecode: Literal["i", "f"], part: memoryview) -> array[Any]:
    if len(part) % 4:
        raise ValueError(f"{name} of {len(part)} bytes, which is no multiple of 4")
    out: array[Any] = array(typecode)
    out.frombytes(part)
    return out


def _mask(sizes: memoryview | None, ids: memoryview | None) -> SamplingMask | None:
    if sizes is None and ids is None:
        return None
    if sizes is None or ids is None:
        raise ValueError("half a sampling mask")
    return SamplingMask(_array("sizes of the sampling mask", "i", sizes), _array("sampling mask", "i", ids))

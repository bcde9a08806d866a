"""The columns of a segment, and a `Trajectory` to and from one row of them."""

from __future__ import annotations

from array import array
from typing import Any, Literal

import msgspec
import pyarrow as pa

from syncline.contract.recorded import SamplingMask
from syncline.contract.token_path import (
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    check,
)
from syncline.contract.turns import Turn
from syncline.contract.version_path import VersionId

_SEGMENT = pa.struct([("kind", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
_SPAN = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("epoch", pa.int32()),
        ("number", pa.int32()),
        ("digest", pa.string()),
        ("adapter", pa.string()),
        ("context", pa.string()),
        ("carried_age", pa.int32()),
        ("worker", pa.string()),
    ]
)
_CONVENTION = pa.struct(
    [("logprob", pa.string()), ("temperature", pa.float64()), ("top_p", pa.float64()), ("top_k", pa.int32())]
)
_TIMING = pa.struct([(name, pa.float64()) for name in ("started", "queued", "prefill", "decode")])

SCHEMA = pa.schema(
    [
        ("job", pa.string()),
        ("trajectory", pa.string()),
        ("group", pa.int64()),
        ("index", pa.int32()),
        ("attempt", pa.int32()),
        ("prompt", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("segments", pa.list_(_SEGMENT)),
        ("logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.binary()),
        ("spans", pa.list_(_SPAN)),
        ("convention", _CONVENTION),
        ("finish", pa.string()),
        ("contract", pa.string()),
        ("text", pa.string()),
        ("traceparent", pa.string()),
        ("timing", _TIMING),
        ("turns", pa.string()),  # JSON; read by scorers and people
        ("expert_ids", pa.large_binary()),
        ("expert_shape", pa.list_(pa.int32())),
        ("expert_dtype", pa.string()),
        ("mask_sizes", pa.list_(pa.int32())),  # null: no sampling mask was recorded
        ("mask_ids", pa.list_(pa.int32())),
        ("sampled", pa.int32()),
        ("span_count", pa.int32()),
        ("reward_state", pa.string()),
        ("reward_value", pa.float64()),
        ("reward_reason", pa.string()),
        ("reward_judge", pa.string()),
        ("reward_seconds", pa.float64()),
        ("reward_attempt", pa.int32()),
        ("use", pa.string()),
        ("why", pa.string()),
        ("lag", pa.int32()),
        ("advantage", pa.float64()),
        ("used_mask", pa.binary()),
    ]
)
"""Columns of a segment: the trajectory's own, its reward's, and what the batch decided."""

SCORES = pa.schema(
    [
        ("trajectory", pa.string()),
        ("logprobs", pa.list_(pa.float32())),
        ("weights", pa.list_(pa.float32())),
        ("gap", pa.list_(pa.float32())),
        ("advantage", pa.float64()),
    ]
)
"""Columns of an update's scores; one row per trained trajectory, lists over its sampled tokens."""

_TURNS = msgspec.json.Decoder(tuple[Turn, ...])
_PLAIN = (
    "job",
    "trajectory",
    "group",
    "index",
    "attempt",
    "prompt",
    "loss_mask",
    "finish",
    "contract",
    "text",
    "traceparent",
    "expert_ids",
    "expert_dtype",
    "sampled",
)


def row_of(t: Trajectory) -> dict[str, Any]:
    """The trajectory's columns of one row. Raises `BadTrajectory` for a record that does not add up."""
    check(t)
    spans = []
    for span in t.spans:
        flat = msgspec.structs.asdict(span)
        version: VersionId = flat.pop("version")
        spans.append({**flat, "epoch": version.epoch, "number": version.number})
    return {
        **{name: getattr(t, name) for name in _PLAIN},
        "tokens": t.tokens.tolist(),
        "logprobs": t.logprobs.tolist(),
        "segments": [msgspec.structs.asdict(segment) for segment in t.segments],
        "spans": spans,
        "span_count": len(spans),
        "convention": msgspec.structs.asdict(t.convention),
        "timing": msgspec.structs.asdict(t.timing),
        "turns": msgspec.json.encode(t.turns).decode() if t.turns else None,
        "expert_shape": None if t.expert_shape is None else list(t.expert_shape),
        "mask_sizes": None if t.mask is None else t.mask.sizes.tolist(),
        "mask_ids": None if t.mask is None else t.mask.ids.tolist(),
    }


def trajectory_of(raw: dict[str, Any], tokens: array[int], logprobs: array[float]) -> Trajectory:
    """Inverse of `row_of`, checked. Raises `BadTrajectory`, or `ValueError` for a wrong kind of column."""
    spans = []
    for span in raw["spans"]:
        version = VersionId(span.pop("epoch"), span.pop("number"))
        spans.append(VersionSpan(**span, version=version))
    shape = raw["expert_shape"]
    return check(
        Trajectory(
            **{name: raw[name] for name in _PLAIN if name != "sampled"},
            tokens=tokens,
            logprobs=logprobs,
            segments=tuple(Segment(**segment) for segment in raw["segments"]),
            spans=tuple(spans),
            convention=SamplingConvention(**raw["convention"]),
            timing=Timing(**raw["timing"]),
            turns=_TURNS.decode(raw["turns"]) if raw.get("turns") else (),
            expert_shape=None if shape is None else (shape[0], shape[1], shape[2]),
            mask=_mask(raw),
        )
    )


def _mask(raw: dict[str, Any]) -> SamplingMask | None:
    """Segments of before the mask have no such columns."""
    sizes, ids = raw.get("mask_sizes"), raw.get("mask_ids")
    return None if sizes is None or ids is None else SamplingMask(array("i", sizes), array("i", ids))


def column_floats(table: pa.Table, name: str, code: Literal["i", "f"] = "f") -> list[array[Any]]:
    """A list<int32> or list<float32> column as one `array` per row, bits unchanged."""
    column = table[name].combine_chunks()
    values = column.flatten()
    start = values.offset
    data = values.buffers()[1]
    flat: array[Any] = array(code)
    if data is not None:
        flat.frombytes(memoryview(data)[start * 4 : (start + len(values)) * 4])
    out: list[array[Any]] = []
    edge = 0
    for length in column.value_lengths().to_pylist():
        out.append(flat[edge : edge + length])
        edge += length
    return out

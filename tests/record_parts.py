"""A record's stream field taken apart, changed in one place and put together, by the text of its contract alone."""

from __future__ import annotations

from typing import Any

import msgspec

NAMES = (
    *(
        "job",
        "trajectory",
        "group",
        "index",
        "attempt",
        "prompt",
        "segments",
        "spans",
        "convention",
        "finish",
    ),
    *("contract", "text", "traceparent", "timing", "turns", "loss_mask", "expert_ids", "expert_shape"),
    *("expert_dtype", "tokens", "logprobs", "mask_sizes", "mask_ids"),
)


def parts(fields: dict[bytes, bytes]) -> dict[str, Any]:
    """The parts of a whole record, by name."""
    return dict(zip(NAMES, msgspec.msgpack.decode(fields[b"m"]), strict=True))


def with_part(fields: dict[bytes, bytes], name: str, part: object) -> dict[bytes, bytes]:
    """The record with another part."""
    changed = parts(fields)
    assert name in changed
    changed[name] = part
    return {b"m": msgspec.msgpack.encode(list(changed.values()))}

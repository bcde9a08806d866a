"""What the server says of versions and routes, decoded: version labels, spans per output token, expert ids.

A label is `<epoch>.<number>@<first 12 hex digits of the manifest's digest>`. It is given to the server with the
weights, and comes back with every token that they sampled.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from syncline.contract.version_path import VersionId, parse_version
from syncline.rollout.engine import Experts

SHORT = 12
"""Hex digits of a digest in a label."""


class Untrue(RuntimeError):
    """The server attests what cannot be: spans with gaps, a version that was never loaded, routes of another model."""


class Attested(msgspec.Struct, frozen=True):
    """Output tokens [start, end) of one reply were sampled under `label`."""

    label: str
    start: int
    end: int


def label_of(version: VersionId, digest: str) -> str:
    """The label of a version with this manifest digest."""
    return f"{version}@{digest[:SHORT]}"


def parse_label(label: str) -> tuple[VersionId, str]:
    """(version, short digest). Raises `ValueError` for a label that this engine did not give."""
    version, at, digest = label.partition("@")
    if not at or len(digest) != SHORT:
        raise ValueError(f"weight version {label!r} is not of the form EPOCH.NUMBER@DIGEST12")
    return parse_version(version), digest


def attested(meta: Mapping[str, Any], tokens: int) -> tuple[Attested, ...]:
    """The spans of a reply with `tokens` output tokens. Raises `Untrue` unless they cover each token once, in order.

    A server that sends no spans (older than 0.5.23) attests its one `weight_version` for all of them.
    """
    rows = meta.get("weight_versions")
    if rows is None:
        rows = [{"version": meta.get("weight_version"), "start": 0, "end": tokens}]
    spans = tuple(Attested(str(row["version"]), row["start"], row["end"]) for row in rows)
    spans = tuple(span for span in spans if span.end > span.start)
    at = 0
    for span in spans:
        if span.start != at:
            raise Untrue(f"version spans {rows} of {tokens} tokens do not follow one another")
        at = span.end
    if at != tokens:
        raise Untrue(f"version spans {rows} do not cover {tokens} tokens")
    return spans


def decode_experts(text: str, rows: int, layers: int, routing: int, topk: int, experts: int) -> np.ndarray:
    """Expert ids [rows, routing layers, topk] from base64 of int32 [rows, all layers, topk], as uint8 or uint16.

    The first layers may be dense; the last `routing` route. Raises `Untrue` for another size or an unknown id.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise Untrue(f"routed_experts is no base64: {error}") from None
    if len(raw) != rows * layers * topk * 4:
        raise Untrue(f"routed_experts has {len(raw)} bytes, [{rows}, {layers}, {topk}] of int32 were due")
    ids = np.frombuffer(raw, "<i4").reshape(rows, layers, topk)[:, layers - routing :]
    if ids.size and (ids.min() < 0 or ids.max() >= experts):
        raise Untrue(f"routed_experts holds id {ids.min()} or {ids.max()}, the model has {experts} experts")
    return ids.astype(np.uint8 if experts <= 256 else np.dtype("<u2"))


def joined_experts(parts: Sequence[np.ndarray]) -> Experts | None:
    """The rows of all `parts`, one after another; None: there are none."""
    if not parts:
        return None
    rows = np.concatenate(parts)
    tokens, layers, topk = rows.shape
    return Experts(rows.tobytes(), (tokens, layers, topk), "u1" if rows.itemsize == 1 else "u2")

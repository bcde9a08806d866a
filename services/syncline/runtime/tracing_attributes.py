"""A span's attributes as OpenTelemetry takes them. For `tracing.py` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import SpanLimits

from syncline.contract.version_path import VersionId

Given = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float] | VersionId | None
_SCALARS = frozenset((str, int, float, bool))


def plain(given: Mapping[str, Given], limits: SpanLimits) -> dict[str, Any]:
    """What a span of the SDK would hold of them: None is "none", a version EPOCH.NUMBER, a list a tuple.

    What is neither text nor number is the SDK's to take, to turn into something or to leave out, with a warning.
    """
    told: dict[str, Any] = {
        name: value if type(value) in _SCALARS else _said(value) for name, value in given.items()
    }
    if limits.max_span_attribute_length is None and all(type(value) in _SCALARS for value in told.values()):
        return told
    most, length = limits.max_span_attributes, limits.max_span_attribute_length
    return dict(BoundedAttributes(most, told, max_value_len=length))


def _said(value: Given) -> Any:
    if value is None:
        return "none"  # OpenTelemetry has no null
    return str(value) if isinstance(value, VersionId) else value

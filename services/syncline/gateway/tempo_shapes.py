"""What the Tempo API says, as Grafana reads it. Names and forms are Tempo's: 64-bit numbers are strings."""

from __future__ import annotations

from typing import Any

import msgspec

from syncline.contract.token_path import TOKEN_PATH
from syncline.contract.validation import VALIDATION_PATH
from syncline.contract.version_path import VERSION_PATH
from syncline.gateway.tempo_store import Found
from syncline.gateway.traceql_tree import Field, Query

HOPS = (*TOKEN_PATH, *VERSION_PATH, *VALIDATION_PATH)
SPAN_TAGS = sorted({"job", "error", *(name for hop in HOPS for name in hop.attributes)})
RESOURCE_TAGS = ["service.instance.id", "service.name"]


class AnyValue(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exactly one is there."""

    stringValue: str | None = None
    intValue: str | None = None
    doubleValue: float | None = None
    boolValue: bool | None = None


class Pair(msgspec.Struct, frozen=True):
    """One attribute."""

    key: str
    value: AnyValue


class FoundSpan(msgspec.Struct, frozen=True):
    """A span that matched, with the attributes that the query names."""

    spanID: str
    name: str
    startTimeUnixNano: str
    durationNanos: str
    attributes: list[Pair]


class SpanSet(msgspec.Struct, frozen=True):
    """`matched`: how many there are; `spans`: the first of them."""

    spans: list[FoundSpan]
    matched: int


class FoundTrace(msgspec.Struct, frozen=True):
    """A trace with spans that matched."""

    traceID: str
    rootServiceName: str
    rootTraceName: str
    startTimeUnixNano: str
    durationMs: int
    spanSets: list[SpanSet]
    spanSet: SpanSet


class SearchMetrics(msgspec.Struct, frozen=True):
    """Tempo's account of its work; the local store has none."""

    inspectedTraces: int = 0


class SearchAnswer(msgspec.Struct, frozen=True):
    """Traces that a query matches, newest first."""

    traces: list[FoundTrace]
    metrics: SearchMetrics = SearchMetrics()


class TagScope(msgspec.Struct, frozen=True):
    """Tags of one scope."""

    name: str
    tags: list[str]


class TagScopes(msgspec.Struct, frozen=True):
    """Tags by scope: every attribute that a hop declares."""

    scopes: list[TagScope]


class TagNames(msgspec.Struct, frozen=True):
    """Tags without their scopes."""

    tagNames: list[str]


class TagValue(msgspec.Struct, frozen=True):
    """`type`: string, int, float, bool or keyword."""

    type: str
    value: str


class TagValues(msgspec.Struct, frozen=True):
    """Values that a tag has."""

    tagValues: list[TagValue]


class TagValuesV1(msgspec.Struct, frozen=True):
    """The same without types."""

    tagValues: list[str]


class BuildInfo(msgspec.Struct, frozen=True):
    """Who answers: syncline, in the place of a Tempo."""

    version: str
    revision: str = ""
    branch: str = ""
    buildUser: str = ""
    buildDate: str = ""
    goVersion: str = ""


class TraceJson(msgspec.Struct, frozen=True):
    """`trace`: OpenTelemetry's TracesData in protobuf's JSON form (ids in base64)."""

    trace: dict[str, Any]


class BatchesJson(msgspec.Struct, frozen=True):
    """The older form: the same `ResourceSpans` under another name."""

    batches: list[Any]


def search_answer(found: list[Found], query: Query) -> SearchAnswer:
    """What a search found."""
    return SearchAnswer([_trace(one, query) for one in found])


def tag_value(kind: str, value: object, field: Field) -> TagValue:
    """A value as the store gives it, by JSON's name of its type."""
    if kind in ("true", "false"):
        return TagValue("bool", kind)
    if field.scope == "intrinsic" and field.name in ("status", "kind"):
        return TagValue("keyword", str(value))
    return TagValue({"integer": "int", "real": "float"}.get(kind, "string"), str(value))


def _trace(found: Found, query: Query) -> FoundTrace:
    spans = [
        FoundSpan(id, name, str(start), str(end - start), _pairs(query.fields(), values))
        for id, name, start, end, values in found.spans
    ]
    matched = SpanSet(spans, found.matched)
    return FoundTrace(
        traceID=found.trace_id,
        rootServiceName=found.root_service,
        rootTraceName=found.root_name,
        startTimeUnixNano=str(found.start_ns),
        durationMs=(found.end_ns - found.start_ns) // 1_000_000,
        spanSets=[matched],
        spanSet=matched,
    )


def _pairs(fields: list[Field], values: list[object]) -> list[Pair]:
    named = zip(fields, values, strict=True)
    return [
        Pair(field.name, _any(value)) for field, value in named if value is not None and field.name != "name"
    ]


def _any(value: object) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(boolValue=value)
    if isinstance(value, int):
        return AnyValue(intValue=str(value))
    if isinstance(value, float):
        return AnyValue(doubleValue=value)
    return AnyValue(stringValue=str(value))

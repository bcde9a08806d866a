"""Stored spans in OpenTelemetry's own message classes, as bytes or JSON: for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status, TracesData

from syncline.runtime.trace_store import Attribute, SpanRecord, parse_traceparent

SCOPE = "syncline"


def traces_data(spans: Sequence[SpanRecord]) -> bytes:
    """`TracesData`, which is also Tempo's `Trace`: one `ResourceSpans` per process."""
    found: bytes = _traces(spans).SerializeToString()
    return found


def traces_dict(spans: Sequence[SpanRecord]) -> dict[str, Any]:
    """The same as protobuf's JSON: ids in base64, 64-bit numbers as strings."""
    found: dict[str, Any] = MessageToDict(_traces(spans))
    return found


def wrapped(message: bytes) -> bytes:
    """A message whose field 1 is `message`: Tempo's `TraceByIDResponse` around its `Trace`."""
    size, left = bytearray(), len(message)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    size.append(left)
    return b"\x0a" + bytes(size) + message


def _traces(spans: Sequence[SpanRecord]) -> TracesData:
    processes: dict[tuple[str, str], list[SpanRecord]] = {}
    for span in spans:
        processes.setdefault((span.service, span.instance), []).append(span)
    return TracesData(
        resource_spans=[
            ResourceSpans(
                resource=Resource(
                    attributes=[_pair("service.name", service), _pair("service.instance.id", instance)]
                ),
                scope_spans=[
                    ScopeSpans(scope=InstrumentationScope(name=SCOPE), spans=[_span(span) for span in theirs])
                ],
            )
            for (service, instance), theirs in processes.items()
        ]
    )


def _span(span: SpanRecord) -> Span:
    error = span.attributes.get("error")
    return Span(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_id or ""),
        name=span.name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=[_pair(name, value) for name, value in span.attributes.items()],
        links=[_link(link) for link in span.links],
        status=Status() if error is None else Status(code=Status.STATUS_CODE_ERROR, message=str(error)),
    )


def _link(traceparent: str) -> Span.Link:
    trace, span, flags = parse_traceparent(traceparent)
    return Span.Link(trace_id=trace.to_bytes(16), span_id=span.to_bytes(8), flags=flags)


def _pair(name: str, value: Attribute) -> KeyValue:
    return KeyValue(key=name, value=_any(value))


def _any(value: Attribute) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_any(one) for one in value]))
    return AnyValue() if value is None else AnyValue(string_value=value)

"""Spans in OpenTelemetry's own message classes, as bytes or JSON: for other programs, and from other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status as RpcStatus
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status, TracesData

from syncline.runtime.trace_store import Attribute, SpanRecord, parse_traceparent, traceparent_of

SCOPE = "syncline"
_LATEST = (1 << 63) - 1  # nanoseconds that the store can keep


def traces_data(spans: Sequence[SpanRecord]) -> bytes:
    """`TracesData`, which is also Tempo's `Trace`: one `ResourceSpans` per process."""
    found: bytes = _traces(spans).SerializeToString()
    return found


def traces_dict(spans: Sequence[SpanRecord]) -> dict[str, Any]:
    """The same as protobuf's JSON: ids in base64, 64-bit numbers as strings."""
    found: dict[str, Any] = MessageToDict(_traces(spans))
    return found


def records_of(message: bytes) -> list[SpanRecord]:
    """The spans of an OTLP `ExportTraceServiceRequest`, which has the form of `TracesData`: inverse of `traces_data`.

    The status of a span that failed becomes its attribute `error`, as in the store of the process that told it. Raises
    `ValueError` for bytes that are no such message, and for what the store cannot keep, naming the span.
    """
    try:
        request = ExportTraceServiceRequest.FromString(message)
    except DecodeError:
        raise ValueError("the body is no ExportTraceServiceRequest") from None
    return [
        _record(span, *_process(resource.resource))
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def export_answer() -> bytes:
    """`ExportTraceServiceResponse` that says: all were taken."""
    said: bytes = ExportTraceServiceResponse().SerializeToString()
    return said


def export_refusal(message: str) -> bytes:
    """`google.rpc.Status`, in which OTLP/HTTP says why a request was refused."""
    said: bytes = RpcStatus(message=message).SerializeToString()
    return said


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


# ---- back ------------------------------------------------------------------------------------------------------
def _process(resource: Resource) -> tuple[str, str]:
    """(service, instance) of the process that told spans."""
    said = _attributes(resource.attributes, "the resource")
    service, instance = said.pop("service.name", None), said.pop("service.instance.id", None)
    if not isinstance(service, str) or not isinstance(instance, str) or not service or not instance:
        raise ValueError("the resource does not say service.name and service.instance.id, both as text")
    if said:
        raise ValueError(f"the resource has attributes {sorted(said)}, which the store does not keep")
    return service, instance


def _record(span: Span, service: str, instance: str) -> SpanRecord:
    what = f"span {span.span_id.hex() or 'without id'} ({span.name})"
    trace_id, span_id = _id(span.trace_id, 16, f"{what}: trace_id"), _id(span.span_id, 8, f"{what}: span_id")
    start, end = int(span.start_time_unix_nano), int(span.end_time_unix_nano)
    if not span.name:
        raise ValueError(f"{what}: has no name")
    if not start <= end <= _LATEST:
        raise ValueError(f"{what}: ends at {end}, which is before its start, {start}, or after all time")
    if span.events:
        raise ValueError(f"{what}: has events, which the store does not keep")
    attributes = _attributes(span.attributes, what)
    if span.status.code == Status.STATUS_CODE_ERROR:
        attributes.setdefault("error", span.status.message or "error")
    return SpanRecord(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=_id(span.parent_span_id, 8, f"{what}: parent_span_id") if span.parent_span_id else None,
        name=span.name,
        service=service,
        instance=instance,
        start_ns=start,
        end_ns=end,
        attributes=attributes,
        links=tuple(_traceparent(link, what) for link in span.links),
    )


def _traceparent(link: Span.Link, what: str) -> str:
    trace, span = (
        _id(link.trace_id, 16, f"{what}: a link's trace_id"),
        _id(link.span_id, 8, f"{what}: a link's span_id"),
    )
    return traceparent_of(int(trace, 16), int(span, 16), link.flags & 0xFF)  # above: whether it was remote


def _id(given: bytes, size: int, what: str) -> str:
    if len(given) != size or not any(given):
        raise ValueError(
            f"{what} must have {size} bytes that are not all zero, and has {given.hex() or 'none'}"
        )
    return given.hex()


def _attributes(pairs: Sequence[KeyValue], what: str) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {}
    for pair in pairs:
        if pair.key in found:
            raise ValueError(f"{what}: has attribute {pair.key!r} more than once")
        found[pair.key] = _plain(pair.value, f"{what}: attribute {pair.key!r}")
    return found


def _plain(value: AnyValue, what: str) -> Attribute:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_scalar(one, f"{what}, an element") for one in value.array_value.values]
    return None if kind is None else _scalar(value, what)


def _scalar(value: AnyValue, what: str) -> str | int | float | bool:
    kind = value.WhichOneof("value")
    if kind not in ("string_value", "bool_value", "int_value", "double_value"):
        raise ValueError(f"{what} is a {kind or 'nothing'}, which the store does not keep")
    found: str | int | float | bool = getattr(value, kind)
    return found

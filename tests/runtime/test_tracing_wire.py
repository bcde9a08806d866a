"""OTLP bytes become the spans that they were made of, or are refused with the span that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList

from syncline.runtime.trace_store import Attribute, SpanRecord
from syncline.runtime.tracing_wire import records_of, traces_data

TEXT = st.text(st.characters(codec="utf-8"))
NAMES = TEXT.filter(bool)


def ids(digits: int) -> st.SearchStrategy[str]:
    return st.integers(1, 16**digits - 1).map(lambda number: f"{number:0{digits}x}")


LINKS = st.builds("00-{}-{}-{:02x}".format, ids(32), ids(16), st.integers(0, 255))
SCALARS = st.one_of(TEXT, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
VALUES: st.SearchStrategy[Attribute] = st.one_of(st.none(), SCALARS, st.lists(SCALARS))


@st.composite
def span_records(draw: st.DrawFn) -> SpanRecord:
    start = draw(st.integers(0, 2**63 - 1))
    return SpanRecord(
        trace_id=draw(ids(32)),
        span_id=draw(ids(16)),
        parent_id=draw(st.none() | ids(16)),
        name=draw(NAMES),
        service=draw(st.sampled_from(["rollout", "trainer"])),
        instance=draw(st.sampled_from(["w0", "w1"])),
        start_ns=start,
        end_ns=draw(st.integers(start, 2**63 - 1)),
        attributes=draw(st.dictionaries(TEXT, VALUES, max_size=4)),
        links=tuple(draw(st.lists(LINKS, max_size=3))),
    )


@given(st.lists(span_records(), max_size=6))
def test_what_is_written_is_what_is_read(spans: list[SpanRecord]) -> None:
    """In the order of their processes, as messages hold them."""
    processes = list(dict.fromkeys((span.service, span.instance) for span in spans))
    expected = sorted(spans, key=lambda span: processes.index((span.service, span.instance)))
    found = records_of(traces_data(spans))
    assert found == expected
    kinds = [[type(value) for value in span.attributes.values()] for span in found]
    assert kinds == [[type(value) for value in span.attributes.values()] for span in expected]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        found = records_of(body)
    except ValueError:
        return
    assert records_of(traces_data(found)) == found


GOOD = SpanRecord(
    trace_id="1" * 32,
    span_id="2" * 16,
    parent_id="3" * 16,
    name="token.scored",
    service="trainer",
    instance="trainer",
    start_ns=5,
    end_ns=7,
    attributes={"job": "j1"},
    links=(f"00-{'4' * 32}-{'5' * 16}-01",),
)
NAMED = rf"span {'2' * 16} \(token\.scored\): "
Harm = Callable[[Any], Any]


def changed(harm: Harm) -> bytes:
    """The request with `GOOD`, after `harm` has changed its span."""
    request = ExportTraceServiceRequest.FromString(traces_data([GOOD]))
    harm(request.resource_spans[0].scope_spans[0].spans[0])
    body: bytes = request.SerializeToString()
    return body


def _value(**kind: Any) -> Harm:
    return lambda span: span.attributes.append(KeyValue(key="k", value=AnyValue(**kind)))


HARMS: list[tuple[str, Harm]] = [
    ("trace_id must have 16 bytes", lambda span: setattr(span, "trace_id", b"1")),
    ("trace_id must have 16 bytes", lambda span: setattr(span, "trace_id", b"\0" * 16)),
    ("parent_span_id must have 8 bytes", lambda span: setattr(span, "parent_span_id", b"\0" * 8)),
    ("a link's trace_id must have 16", lambda span: setattr(span.links[0], "trace_id", b"")),
    ("a link's span_id must have 8", lambda span: setattr(span.links[0], "span_id", b"123")),
    ("ends at 4, which is before its start, 5", lambda span: setattr(span, "end_time_unix_nano", 4)),
    (".*after all time", lambda span: setattr(span, "end_time_unix_nano", 2**63)),
    ("has events", lambda span: span.events.add(name="seen")),
    ("attribute 'k' is a bytes_value", _value(bytes_value=b"x")),
    ("attribute 'k' is a kvlist_value", _value(kvlist_value=KeyValueList())),
    ("attribute 'k', an element is a nothing", _value(array_value=ArrayValue(values=[AnyValue()]))),
    (
        "attribute 'k', an element is a array_value",
        _value(array_value=ArrayValue(values=[AnyValue(array_value=ArrayValue())])),
    ),
    (
        "has attribute 'job' more than once",
        lambda span: span.attributes.append(KeyValue(key="job", value=AnyValue(int_value=1))),
    ),
]


@pytest.mark.parametrize(("story", "harm"), HARMS, ids=[story for story, _ in HARMS])
def test_what_the_store_cannot_keep_is_refused_by_span(story: str, harm: Harm) -> None:
    assert records_of(changed(lambda _: None)) == [GOOD]
    with pytest.raises(ValueError, match=NAMED + story):
        records_of(changed(harm))


def test_a_span_without_id_or_name_is_named_by_the_other() -> None:
    with pytest.raises(ValueError, match=r"span without id \(token\.scored\): span_id must have 8 bytes"):
        records_of(changed(lambda span: setattr(span, "span_id", b"")))
    with pytest.raises(ValueError, match=rf"span {'2' * 16} \(\): has no name"):
        records_of(changed(lambda span: setattr(span, "name", "")))


@pytest.mark.parametrize("harm", ["gone", "number", "more"])
def test_a_resource_that_names_no_process_is_refused(harm: str) -> None:
    request = ExportTraceServiceRequest.FromString(traces_data([GOOD]))
    said = request.resource_spans[0].resource.attributes
    if harm == "gone":
        del said[0]
    elif harm == "number":
        said[0].value.CopyFrom(AnyValue(int_value=1))
    else:
        said.append(KeyValue(key="host", value=AnyValue(string_value="h")))
    with pytest.raises(ValueError, match="the resource"):
        records_of(request.SerializeToString())


def test_a_failed_span_says_why_as_the_store_does() -> None:
    def fail(span: Any) -> None:
        span.status.code, span.status.message = 2, "RuntimeError: lost"

    assert records_of(changed(fail))[0].attributes == {"job": "j1", "error": "RuntimeError: lost"}


def test_bytes_that_are_no_request() -> None:
    with pytest.raises(ValueError, match="no ExportTraceServiceRequest"):
        records_of(b"\xff\xff")

"""Spans that are made in one go are those that the SDK's own tracer makes: the same OTLP bytes, ids aside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from syncline.contract.hops import Hop
from syncline.contract.token_path import ADMITTED, SAMPLED, TRAINED
from syncline.contract.version_path import MINTED, VersionId
from syncline.runtime import tracing
from syncline.runtime.trace_store import parse_traceparent
from syncline.runtime.tracing_attributes import Given

_BEGAN, _ENDED = 1_700_000_000.25, 1_700_000_001.5
TRAJECTORY = dict[str, Given](job="j1", trajectory="j1-0-0")
CASES: list[tuple[Hop, dict[str, Given]]] = [
    (ADMITTED, {**TRAJECTORY, "update": 3, "lag": 0}),
    (TRAINED, {**TRAJECTORY, "update": 3, "minted": VersionId(0, 4), "advantage": -0.5}),
    (
        MINTED,
        {
            "job": "j1",
            "version": VersionId(1, 2),
            "optimizer_step": 2,
            "parent": None,
            "trajectories": ["a", "b"],
        },
    ),
    (
        MINTED,
        {"job": "j1", "version": VersionId(1, 2), "optimizer_step": True, "parent": "", "trajectories": []},
    ),
    (SAMPLED, dict.fromkeys((*SAMPLED.attributes, "job"), "\u00e9 \U0001f600")),
]


class Kept(BatchSpanProcessor):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def kept() -> Iterator[Kept]:
    tracing.setup("rollout", "w0", None, None)
    kept = Kept()
    tracing._state.batches.append(kept)
    yield kept
    tracing._state.batches.remove(kept)
    tracing.setup("unnamed", "unnamed", None, None)


def by_sdk(
    provider: TracerProvider, hop: Hop, given: dict[str, Given], parent: str, links: list[str]
) -> ReadableSpan:
    def context(text: str) -> otel.SpanContext:
        trace, span, flags = parse_traceparent(text)
        return otel.SpanContext(trace, span, True, otel.TraceFlags(flags))

    inside = otel.NonRecordingSpan(context(parent)) if parent else otel.INVALID_SPAN
    span = provider.get_tracer("syncline").start_span(
        hop.name,
        context=otel.set_span_in_context(inside, Context()),
        links=[otel.Link(context(link)) for link in links],
        start_time=int(_BEGAN * 1e9),
    )
    for name, value in given.items():
        said = str(value) if isinstance(value, VersionId) else value
        span.set_attribute(name, "none" if said is None else said)
    span.end(int(_ENDED * 1e9))
    assert isinstance(span, ReadableSpan)
    return span


def told(span: ReadableSpan) -> object:
    """All of its OTLP but its own ids, and whose trace it is where it has no parent."""
    message = encode_spans([span])
    [one] = message.resource_spans[0].scope_spans[0].spans
    one.span_id = b""
    if not one.parent_span_id:
        one.trace_id = b""
    context = span.get_span_context()
    assert context is not None
    return message, context.trace_flags, context.is_remote


@pytest.mark.parametrize(("hop", "given"), CASES)
@pytest.mark.parametrize("flags", ["", "00", "01", "02", "03"])
@pytest.mark.parametrize("linked", [0, 2])
def test_the_same_span(kept: Kept, hop: Hop, given: dict[str, Given], flags: str, linked: int) -> None:
    parent = f"00-{'1' * 32}-{'2' * 16}-{flags}" if flags else ""
    links = [tracing.new_traceparent() for _ in range(linked)]
    # `parent` is an attribute of some hops, and one argument cannot have two meanings
    context = tracing.record(hop, parent or None, _BEGAN, _ENDED, links, **given)
    [ours] = kept.spans
    theirs = by_sdk(tracing._state.provider, hop, given, parent, links)
    assert told(ours) == told(theirs)
    own = ours.get_span_context()
    assert own is not None
    assert parse_traceparent(context) == (own.trace_id, own.span_id, own.trace_flags)
    assert ours.attributes == theirs.attributes


def test_a_failed_hop_s_status(kept: Kept) -> None:
    with pytest.raises(KeyError), tracing.hop(ADMITTED, **TRAJECTORY):  # type: ignore[arg-type]
        raise KeyError("weights")
    [ours] = kept.spans
    assert (ours.status.status_code, ours.status.description) == (
        otel.StatusCode.ERROR,
        "KeyError: 'weights'",
    )


def test_what_the_sdk_does_not_take_is_its_own_to_judge(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    odd: dict[str, object] = {**TRAJECTORY, "update": object(), "lag": [1, "2"]}
    tracing.record(ADMITTED, None, _BEGAN, _ENDED, **odd)  # type: ignore[arg-type]
    theirs = by_sdk(tracing._state.provider, ADMITTED, odd, "", [])  # type: ignore[arg-type]
    assert kept.spans[0].attributes == theirs.attributes
    assert "Invalid type" in caplog.text


@pytest.mark.parametrize("longest", ["3", ""])
def test_the_sdk_s_limit_of_texts(monkeypatch: pytest.MonkeyPatch, longest: str) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", longest)
    tracing.setup("rollout", "w0", None, None)
    kept = Kept()
    tracing._state.batches.append(kept)
    tracing.record(ADMITTED, None, _BEGAN, _ENDED, update=1, lag=0, **TRAJECTORY)  # type: ignore[arg-type]
    tracing._state.batches.remove(kept)
    tracing.setup("unnamed", "unnamed", None, None)
    assert kept.spans[0].attributes["trajectory"] == ("j1-" if longest else "j1-0-0")  # type: ignore[index]

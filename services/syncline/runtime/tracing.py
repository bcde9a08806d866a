"""Tracing: spans for the hops of the paths, and for nothing else. The importer of opentelemetry.

A span name is a `Hop` of TOKEN_PATH, VERSION_PATH or VALIDATION_PATH. Spans go in the background to what `setup` names:
the local store, an OTLP endpoint, the gateway. The data record is the truth and a trace is a view: `losses()` says how
many spans it lacks. Trace context travels in messages as a W3C traceparent.
"""

from __future__ import annotations

# imported before any provider is made: fork hooks run in order, and a provider's takes a lock that this one's resets
import concurrent.futures.thread  # noqa: F401
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from opentelemetry import trace as otel
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util import BoundedList

from syncline.contract.hops import Hop
from syncline.contract.token_path import TOKEN_PATH
from syncline.contract.validation import VALIDATION_PATH
from syncline.contract.version_path import VERSION_PATH
from syncline.runtime.trace_store import SpanRecord, parse_traceparent, read_trace, spans_of, traceparent_of
from syncline.runtime.tracing_attributes import Given, plain
from syncline.runtime.tracing_counts import Counts
from syncline.runtime.tracing_exporters import Counted, StoreExporter, gateway_exporter, otlp_exporter

__all__ = [
    "HopIncomplete",
    "OpenHop",
    "ended",
    "flush",
    "hop",
    "losses",
    "new_traceparent",
    "record",
    "setup",
]
__all__ += ["SpanRecord", "read_trace", "shutdown", "spans_of"]

_LOG = logging.getLogger(__name__)
_HOPS = {hop.name: hop for hop in (*TOKEN_PATH, *VERSION_PATH, *VALIDATION_PATH)}
_DECLARED = {name: frozenset((*hop.attributes, "job")) for name, hop in _HOPS.items()}
_LIMIT = 65536  # links, events and attributes of one span: a batch links every trajectory in it
_SAMPLED, _UNSET = otel.TraceFlags.SAMPLED, otel.Status()
_QUEUE = 65536  # finished spans that may wait for the background writer


class HopIncomplete(ValueError):
    """A hop that closed without exactly its declared attributes. The message names them."""


class _Tracing:
    """The process's provider with its exporters, and what it has lost."""

    def __init__(
        self,
        service: str,
        instance: str,
        store: Path | None,
        otlp: str | None,
        gateway: tuple[str, str] | None = None,
    ) -> None:
        targets = (("store", store), ("otlp", otlp), ("gateway", gateway))
        self.exporters = [name for name, given in targets if given is not None]
        self.counts = Counts(["ended", "incomplete", "skewed", "links", *self.exporters])
        self.limits = SpanLimits(
            max_attributes=_LIMIT, max_span_attributes=_LIMIT, max_events=_LIMIT, max_links=_LIMIT
        )
        self.provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource({SERVICE_NAME: service, SERVICE_INSTANCE_ID: instance}),
            span_limits=self.limits,
            shutdown_on_exit=False,
        )
        self.batches: list[BatchSpanProcessor] = []
        if store is not None:
            self._add("store", StoreExporter(store, service, instance))
        if otlp is not None:
            self._add("otlp", otlp_exporter(f"{otlp.rstrip('/')}/v1/traces"))
        if gateway is not None:
            self._add("gateway", gateway_exporter(*gateway))
        # the SDK's own root span, never ended: ours have its resource, scope and flags. None: OTEL_SDK_DISABLED
        root = self.provider.get_tracer("syncline").start_span("root")
        self.root = root if isinstance(root, ReadableSpan) else None
        self.flags = root.get_span_context().trace_flags

    def _add(self, name: str, exporter: SpanExporter) -> None:
        counted = Counted(exporter, name, self.counts)
        batch = BatchSpanProcessor(counted, _QUEUE, schedule_delay_millis=500, max_export_batch_size=512)
        self.provider.add_span_processor(batch)
        self.batches.append(batch)


_state = _Tracing("unnamed", "unnamed", None, None)
_ids = RandomIdGenerator()


def setup(
    service: str,
    instance: str,
    store: Path | None,
    otlp: str | None,
    gateway: tuple[str, str] | None = None,
) -> None:
    """Send this process's spans to `store`, to the OTLP/HTTP base URL `otlp`, and to a gateway that takes spans (its
    base URL and its key, 0021); None: not there."""
    global _state
    _state.provider.shutdown()
    _state = _Tracing(service, instance, store, otlp, gateway)


def flush() -> None:
    """Write out every span that has ended."""
    _state.provider.force_flush()


def shutdown() -> None:
    """Flush and stop. Says in the log what was lost; later spans are not kept."""
    _state.provider.force_flush()
    _state.provider.shutdown()
    lost = {name: count for name, count in _losses(_state.counts.own).items() if count}
    if lost:
        _LOG.warning("tracing ends with losses: %s", lost)


def ended() -> int:
    """Spans that this process and its children have ended."""
    return _state.counts.total("ended")


def losses() -> dict[str, int]:
    """What the view lacks: spans ended and not (yet) taken, by exporter name; `incomplete`: hops that closed
    with wrong attributes; `skewed`: spans told with an end before their start (the wall clock was set back);
    `links`: of those that one span may have, what was beyond. Of this process and its children."""
    return _losses(_state.counts.total)


def _losses(count: Callable[[str], int]) -> dict[str, int]:
    missing = {name: count("ended") - count(name) for name in _state.exporters}
    return {**missing, **{name: count(name) for name in ("incomplete", "skewed", "links")}}


def new_traceparent() -> str:
    """Context of a new trace whose root span is not ours to write."""
    return f"00-{_ids.generate_trace_id():032x}-{_ids.generate_span_id():016x}-01"


class OpenHop:
    """A hop being passed: `set` its attributes before it closes; `traceparent` is its context for others."""

    def __init__(self, hop: Hop, parent: str | None, links: Sequence[str], start_ns: int) -> None:
        known = _HOPS.get(hop.name)
        if known is not hop and known != hop:
            raise ValueError(f"hop {hop.name!r} is on no path: the paths in `contract` name all spans")
        self._hop, self._start_ns = hop, start_ns
        self._given: dict[str, Given] = {}
        self._error: str | None = None
        self._links = [_context(link) for link in links]
        self._parent = _context(parent) if parent else None
        self._own = _own(self._parent)
        self.traceparent = traceparent_of(self._own.trace_id, self._own.span_id, self._own.trace_flags)

    def set(self, **attributes: Given) -> None:
        """Add attributes; None is written as "none", a version as EPOCH.NUMBER."""
        self._given.update(attributes)

    def _check(self) -> None:
        """Raises `HopIncomplete` under SYNCLINE_STRICT=1, counts and warns otherwise."""
        declared = _DECLARED[self._hop.name]
        if self._given.keys() == declared:
            return
        missing, extra = sorted(declared - self._given.keys()), sorted(self._given.keys() - declared)
        story = f"hop {self._hop.name} closed without attributes {missing} and with undeclared {extra}"
        if os.environ.get("SYNCLINE_STRICT") == "1":
            raise HopIncomplete(story)
        _state.counts.add("incomplete")
        if _state.counts.own("incomplete") == 1:
            _LOG.warning("%s (later ones are only counted)", story)

    def _end(self, at_ns: int) -> None:
        """Give the span to the writers. It is made here, in one go: the SDK's tracer would take five times as long."""
        _state.counts.add("ended")
        root = _state.root
        if root is None:
            return
        joined = [otel.Link(context) for context in self._links]
        links = BoundedList.from_seq(_LIMIT, joined) if joined else ()
        span = ReadableSpan(
            name=self._hop.name,
            context=self._own,
            parent=self._parent,
            resource=root.resource,
            attributes=plain(self._given, _state.limits),
            links=links,
            status=_UNSET if self._error is None else otel.Status(otel.StatusCode.ERROR, self._error),
            start_time=self._start_ns,
            end_time=at_ns,
            instrumentation_scope=root.instrumentation_scope,
        )
        if span.dropped_links:
            _state.counts.add("links", span.dropped_links)
        for batch in _state.batches:
            batch.on_end(span)


@contextmanager
def hop(
    hop: Hop, /, parent: str | None = None, links: Sequence[str] = (), **attributes: Given
) -> Iterator[OpenHop]:
    """A span around the block, which must set exactly the hop's declared attributes and `job`.

    parent   traceparent of the hop that this one follows; None or empty: the root of a new trace. (An
             attribute of that name goes through `set`.)
    links    traceparents of other traces that took part
    """
    began, wall = time.perf_counter_ns(), time.time_ns()
    opened = OpenHop(hop, parent, links, wall)
    opened.set(**attributes)
    try:
        yield opened
        opened._check()
    except BaseException as error:
        opened._error = f"{type(error).__name__}: {error}"
        raise
    finally:  # the duration comes from the monotonic clock, so a stepped wall clock cannot make it negative
        opened._end(wall + time.perf_counter_ns() - began)


def record(
    hop: Hop,
    parent: str | None,
    start: float,
    end: float,
    /,  # hops have attributes called parent, start and end
    links: Sequence[str] = (),
    **attributes: Given,
) -> str:
    """A span told afterwards; returns its traceparent. `start` and `end` are wall-clock unix seconds.

    A wall clock that was set back between them is counted as a skewed span without duration.
    """
    if end < start:
        _state.counts.add("skewed")
        end = start
    opened = OpenHop(hop, parent, links, int(start * 1e9))
    opened.set(**attributes)
    try:
        opened._check()
    finally:
        opened._end(int(end * 1e9))
    return opened.traceparent


def _own(parent: otel.SpanContext | None) -> otel.SpanContext:
    """The context of a new span: sampled, its trace the parent's or a new one, as random as the SDK says of it."""
    if _state.root is None:  # messages still carry a traceparent that can be read
        return parent or otel.SpanContext(_ids.generate_trace_id(), _ids.generate_span_id(), False)
    flags = _state.flags
    if parent is None:
        return otel.SpanContext(_ids.generate_trace_id(), _ids.generate_span_id(), False, flags)
    flags = otel.TraceFlags(_SAMPLED | flags & parent.trace_flags)
    return otel.SpanContext(parent.trace_id, _ids.generate_span_id(), False, flags)


def _context(traceparent: str) -> otel.SpanContext:
    trace, span, flags = parse_traceparent(traceparent)
    return otel.SpanContext(trace, span, True, otel.TraceFlags(flags))

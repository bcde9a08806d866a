"""Where spans go: the local store, an OTLP endpoint, the gateway; what each took is counted. For `tracing.py` alone."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from syncline.runtime.trace_store import Row, TraceStore, row_of, traceparent_of
from syncline.runtime.tracing_counts import Counts

_LOG = logging.getLogger(__name__)


class Counted(SpanExporter):
    """Counts spans that an exporter took, under its `name`."""

    def __init__(self, inner: SpanExporter, name: str, counts: Counts) -> None:
        self.inner = inner
        self._name, self._counts = name, counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self.inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._counts.add(self._name, len(spans))
        return result

    def shutdown(self) -> None:
        self.inner.shutdown()


class StoreExporter(SpanExporter):
    """Writes spans into the SQLite store. The batch processor calls it from one thread at a time."""

    def __init__(self, path: Path, service: str, instance: str) -> None:
        self._path, self._service, self._instance = path, service, instance
        self._store: TraceStore | None = None
        self._pid = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            if self._store is None or self._pid != os.getpid():  # a connection must not cross a fork
                self._store, self._pid = TraceStore(self._path), os.getpid()
            self._store.write_rows([_row(span, self._service, self._instance) for span in spans])
        except (sqlite3.Error, OSError) as error:
            _LOG.warning("trace store %s: %d spans lost: %s", self._path, len(spans), error)
            self._store = None
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        if self._store is not None and self._pid == os.getpid():
            self._store.close()
        self._store = None


class OwnConnection(SpanExporter):
    """An exporter over HTTP that a forked child makes anew: two processes must not speak on one connection."""

    def __init__(self, make: Callable[[], SpanExporter]) -> None:
        self._make, self._inner, self._pid = make, make(), os.getpid()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._pid != os.getpid():
            self._inner, self._pid = self._make(), os.getpid()
        return self._inner.export(spans)

    def shutdown(self) -> None:
        if self._pid == os.getpid():
            self._inner.shutdown()


def otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # large: only if used

    return OwnConnection(lambda: OTLPSpanExporter(endpoint=endpoint))


def gateway_exporter(url: str, key: str) -> SpanExporter:
    """To the gateway at `url`, whose `key` says that spans may be written there (gateway/ingest.py)."""
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OwnConnection(
        lambda: OTLPSpanExporter(
            endpoint=f"{url.rstrip('/')}/v1/traces",
            headers={"authorization": f"Bearer {key}"},
            compression=Compression.Gzip,
        )
    )


def _row(span: ReadableSpan, service: str, instance: str) -> Row:
    """The span as the store keeps it, without a record in between."""
    context, parent, attributes = span.context, span.parent, span.attributes or {}
    assert context is not None
    if span.status.status_code is otel.StatusCode.ERROR:
        attributes = {**attributes, "error": span.status.description or "error"}
    return row_of(
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        None if parent is None else f"{parent.span_id:016x}",
        span.name,
        service,
        instance,
        span.start_time or 0,
        span.end_time or 0,
        dict(attributes),
        [
            traceparent_of(link.context.trace_id, link.context.span_id, link.context.trace_flags)
            for link in span.links
        ],
    )

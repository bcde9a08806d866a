"""What `/metrics` says: the gateway's own numbers, and the jobs' (`metrics.py`).

Label sets are bounded: route templates, never ids or paths.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that says when it was first used

MEDIA_TYPE = CONTENT_TYPE_LATEST
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NO_ROUTE = "none"  # the label of every path that no route has


class Numbers:
    """One registry per application, so that two in one process do not share. `jobs`: what else is told."""

    def __init__(self, jobs: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(jobs)
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "syncline_gateway_requests",
            "Requests answered",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "syncline_gateway_seconds",
            "Seconds until the answer began",
            ("route",),
            registry=self._registry,
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10),
        )
        self.streams = Gauge(
            "syncline_gateway_event_streams", "Event streams being served", registry=self._registry
        )

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer. `route` is a template of the application, or `NO_ROUTE`."""
        known = method if method in _METHODS else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

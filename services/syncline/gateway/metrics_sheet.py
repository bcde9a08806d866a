"""`Sheet`: the samples of one scrape, by family. Refuses what the table of names does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from syncline.gateway.metrics_names import METRICS, MOST_VALUES, Metric


class Tally:
    """A histogram that grows: counts per bucket and a sum."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.counts = [0] * (len(metric.buckets) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        place = next(
            (i for i, bound in enumerate(self.metric.buckets) if value <= bound), len(self.metric.buckets)
        )
        self.counts[place] += times
        self.sum += value * times

    def copy(self) -> Tally:
        """Another one that grows by itself."""
        made = Tally(self.metric)
        made.counts, made.sum = list(self.counts), self.sum
        return made


class Sheet:
    """Families in the order of `METRICS`; those without a sample are left out."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def say(self, metric: Metric, value: float | None, *labels: str) -> None:
        """One sample of a gauge or counter. None: not known, so there is no sample."""
        if value is None:
            return
        if metric.kind == "histogram" or len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} is a {metric.kind} with labels {metric.labels}, got {labels}")
        family = self._family(metric)
        family.add_metric(labels, float(value))  # type: ignore[attr-defined]

    def tally(self, tally: Tally, *labels: str) -> None:
        """One histogram."""
        metric = tally.metric
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has labels {metric.labels}, got {labels}")
        bounds, total = [*(str(float(b)) for b in metric.buckets), "+Inf"], 0
        buckets = []
        for bound, count in zip(bounds, tally.counts, strict=True):
            total += count
            buckets.append((bound, total))
        self._family(metric).add_metric(labels, buckets, tally.sum)  # type: ignore[attr-defined]

    def families(self) -> Iterable[Family]:
        """What was said."""
        return [self._families[m.name] for m in METRICS if m.name in self._families]

    def _family(self, metric: Metric) -> Family:
        if metric.name not in self._families:
            kinds = {
                "gauge": GaugeMetricFamily,
                "counter": CounterMetricFamily,
                "histogram": HistogramMetricFamily,
            }
            self._families[metric.name] = kinds[metric.kind](
                metric.name, metric.says, labels=list(metric.labels)
            )
        return self._families[metric.name]


def bounded(values: Mapping[str, float]) -> dict[str, float]:
    """At most `MOST_VALUES` of them by name; the others as the sum `other`."""
    kept = dict(sorted(values.items())[:MOST_VALUES])
    rest = [value for name, value in values.items() if name not in kept]
    return kept | ({"other": kept.get("other", 0.0) + sum(rest)} if rest else {})

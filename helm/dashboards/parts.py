"""Parts of the dashboards: variables, and panels of one shape each, over Grafana's typed SDK.

A query sees its job as `$job_id`, its Prometheus as `${prometheus}` and its Tempo as `${tempo}`, so that a board opens
in any Grafana. Gateways may be several, each with the same numbers: every expression takes the `max` of them first.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import bargauge, dashboard, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import common as look
from grafana_foundation_sdk.builders import prometheus as prom
from grafana_foundation_sdk.builders import tempo as tempo_builder
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Panel,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.tempo import SearchTableType

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${prometheus}")
TEMPO = DataSourceRef(type_val="tempo", uid="${tempo}")
JOB = 'job_id=~"$job_id"'
Query = tuple[str, str]
"""Expression and legend."""


def board(uid: str, title: str, says: str) -> dashboard.Dashboard:
    """A board with the variables that all have."""
    jobs = (
        dashboard.QueryVariable("job_id")
        .label("job")
        .query("label_values(syncline_job_info, job_id)")
        .datasource(PROMETHEUS)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_DESC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(says)
        .tags(["syncline"])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("15s")
        .with_variable(dashboard.DatasourceVariable("prometheus").type("prometheus").label("Prometheus"))
        .with_variable(dashboard.DatasourceVariable("tempo").type("tempo").label("Tempo"))
        .with_variable(jobs)
        .link(
            dashboard.DashboardLink("syncline")
            .tags(["syncline"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )


def _query(expr: str, legend: str, ref: int, instant: bool = False) -> prom.Dataquery:
    made = (
        prom.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + ref)).datasource(PROMETHEUS)
    )
    return made.instant() if instant else made.range()


def lines(title: str, unit: str, *queries: Query, says: str = "", stacked: bool = False) -> Builder[Panel]:
    """Lines over time; `stacked`: areas that add up."""
    panel = (
        timeseries.Panel().title(title).description(says).datasource(PROMETHEUS).unit(unit).span(12).height(8)
    )
    panel = panel.line_width(1).show_points(common.VisibilityMode.NEVER)
    if stacked:
        stacking = look.StackingConfig().mode(common.StackingMode.NORMAL)
        panel = panel.min(0).fill_opacity(40).stacking(stacking)
    for ref, (expr, legend) in enumerate(queries):
        panel = panel.with_target(_query(expr, legend, ref))
    return panel


def figures(title: str, unit: str, *queries: Query, says: str = "", width: int = 6) -> Builder[Panel]:
    """The newest values in large type."""
    panel = (
        stat.Panel().title(title).description(says).datasource(PROMETHEUS).unit(unit).span(width).height(5)
    )
    for ref, (expr, legend) in enumerate(queries):
        panel = panel.with_target(_query(expr, legend, ref, instant=True))
    return panel


def bars(title: str, unit: str, *queries: Query, says: str = "") -> Builder[Panel]:
    """The newest values as bars."""
    panel = (
        bargauge.Panel().title(title).description(says).datasource(PROMETHEUS).unit(unit).span(12).height(8)
    )
    panel = panel.orientation(common.VizOrientation.HORIZONTAL)
    for ref, (expr, legend) in enumerate(queries):
        panel = panel.with_target(_query(expr, legend, ref, instant=True))
    return panel


def rows(title: str, *queries: Query, says: str = "", width: int = 24) -> Builder[Panel]:
    """A table of labels and values."""
    panel = table.Panel().title(title).description(says).datasource(PROMETHEUS).span(width).height(7)
    for ref, (expr, legend) in enumerate(queries):
        panel = panel.with_target(_query(expr, legend, ref, instant=True).format(PromQueryFormat.TABLE))
    return panel


def heat(title: str, expr: str, says: str = "") -> Builder[Panel]:
    """A histogram over time: `expr` gives buckets."""
    panel = heatmap.Panel().title(title).description(says).datasource(PROMETHEUS).span(12).height(8)
    return panel.with_target(_query(expr, "{{le}}", 0).format(PromQueryFormat.HEATMAP))


def traces(title: str, query: str, says: str = "", spans: bool = False, width: int = 24) -> Builder[Panel]:
    """What a TraceQL query finds: a line per trace, or per span."""
    asked = (
        tempo_builder.TempoQuery().query(query).query_type("traceql").limit(50).ref_id("A").datasource(TEMPO)
    )
    asked = asked.table_type(SearchTableType.SPANS if spans else SearchTableType.TRACES).spss(20)
    return (
        table.Panel()
        .title(title)
        .description(says)
        .datasource(TEMPO)
        .span(width)
        .height(9)
        .with_target(asked)
    )


def top(labels: str, expr: str) -> str:
    """The `max` over gateways, which keeps these labels."""
    return f"max by ({labels}) ({expr})"


def rate(labels: str, metric: str, more: str = "") -> str:
    """Per second, over gateways."""
    return top(labels, f"rate({metric}{{{JOB}{more}}}[$__rate_interval])")


def newest(labels: str, metric: str, more: str = "") -> str:
    """The gauge, over gateways."""
    return top(labels, f"{metric}{{{JOB}{more}}}")


def quantile(q: float, labels: str, metric: str) -> str:
    """Of a histogram, over `$__range`: short jobs have few events per rate interval."""
    both = f"{labels}, le" if labels else "le"
    buckets = top(
        f"job_id, {both}" if "job_id" not in both else both, f"increase({metric}_bucket{{{JOB}}}[$__range])"
    )
    return f"histogram_quantile({q}, sum by ({both}) ({buckets}))"

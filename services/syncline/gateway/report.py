"""`report.html` of a job: one self-contained page, made from the same `Evidence` as `summary.json`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import jinja2

from syncline.contract.evaluation import Evaluation
from syncline.contract.events import Phase, UpdateMetrics
from syncline.contract.version_path import VersionRecord
from syncline.gateway import report_charts as charts
from syncline.gateway import report_evaluations as held_out
from syncline.gateway import report_precision as precision
from syncline.gateway import report_prompts as drawn
from syncline.gateway.diagnosed import last_of_each
from syncline.gateway.evidence import Evidence
from syncline.gateway.summary import Summary, last_of_each_update, summarise

SHOWN_VERSION_ROWS = 12


@cache
def templates() -> jinja2.Environment:
    """The gateway's page templates; what they print is escaped, and an unknown name is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("syncline.gateway", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(evidence: Evidence) -> str:
    """The report as HTML that asks the network for nothing."""
    metrics = last_of_each_update(evidence.metrics)
    start, end = extent(evidence)
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            e=evidence,
            s=summarise(evidence),
            facts=facts(evidence, summarise(evidence)),
            number=charts.number,
            reward=reward_chart(metrics, evidence.phases, evidence.evaluations),
            evaluation_headings=held_out.HEADINGS,
            prompt_headings=drawn.HEADINGS,
            prompt_rows=drawn.rows(evidence.prompts),
            evaluation_rows=held_out.rows(evidence.evaluations),
            lag=lag_chart(metrics, evidence.max_lag),
            phases=phase_chart(evidence.phases, start, end),
            phase_legend=charts.legend(
                (name, f"phase-{name}") for name in sorted({p.phase for p in evidence.phases})
            ),
            versions=version_chart(evidence.versions, start, end),
            gap=gap_chart(metrics),
            ledger=ledger_chart(evidence, start),
            **precision_parts(evidence, metrics, summarise(evidence)),
        )
    )


def precision_parts(evidence: Evidence, metrics: Sequence[UpdateMetrics], summary: Summary) -> dict[str, Any]:
    """What the template shows of mismatch, staleness and the six components."""
    records = last_of_each(evidence.diagnostics)
    traces = precision.traces(metrics, evidence.versions)
    return {
        "mismatch": precision.mismatch_chart(records),
        "terms": precision.term_rows(summary.diagnostics),
        "others": precision.other_rows(records),
        "alarms": summary.diagnostics.alarms,
        "trace": precision.trace_rows(traces),
        "held": precision.byte_rows(traces),
    }


def facts(evidence: Evidence, summary: Summary) -> list[tuple[str, str]]:
    """The figures at the top of the page, as `(name, text)`."""

    def shown(value: float | None, unit: str = "") -> str:
        return "–" if value is None else f"{charts.number(value)}{unit}"

    ledger, reward, seconds = summary.ledger, summary.reward, summary.seconds
    return [
        ("updates", str(summary.updates)),
        ("reward, first → last fifth", f"{shown(reward.first_fifth)} → {shown(reward.last_fifth)}"),
        ("lag, largest / bound", f"{shown(summary.lag.max)} / {summary.lag.bound}"),
        ("trajectories trained / submitted", f"{ledger.trained} / {ledger.submitted}"),
        ("lost, repeated", f"{summary.lost}, {summary.repeated}"),
        ("conservation violations", f"{summary.conservation_violations} of {len(evidence.samples)} samples"),
        ("versions active / minted", f"{summary.versions.active} / {summary.versions.minted}"),
        ("log-prob gap at lag 0", shown(summary.mismatch)),
        (
            "set-up, training",
            f"{shown(seconds.setup, ' s')}, {shown(seconds.training, ' s')}",
        ),
    ]


def extent(evidence: Evidence) -> tuple[float, float]:
    """First and last moment of the job, wall-clock unix seconds; (0, 0) when nothing has happened."""
    moments = [phase.at for phase in evidence.phases] + [m.at for m in evidence.metrics]
    moments += [v.minted for v in evidence.versions if v.minted is not None]
    begun = evidence.started if evidence.started is not None else evidence.created
    if begun is not None:
        moments.append(begun)
    if evidence.ended is not None:
        moments.append(evidence.ended)
    return (min(moments), max(moments)) if moments else (0.0, 0.0)


def reward_chart(
    metrics: Sequence[UpdateMetrics], phases: Sequence[Phase], evaluations: Sequence[Evaluation] = ()
) -> str:
    """Reward of each update with its running mean over a tenth of the updates, modes shaded behind.

    An evaluation stands at its version's number, which is the update that made the version.
    """
    width = max(1, len(metrics) // 10)
    smooth: list[tuple[float, float | None]] = []
    for i, m in enumerate(metrics):
        near = [n.reward for n in metrics[max(0, i - width + 1) : i + 1] if n.reward is not None]
        smooth.append((float(m.update), sum(near) / len(near) if near else None))
    raw = [(float(m.update), m.reward) for m in metrics]
    return charts.curves(
        "Reward by update",
        [
            charts.Line(label="each update", style="d", points=raw),
            charts.Line(label=f"mean of the last {width}", style="a", points=smooth),
            *held_out.lines(evaluations),
        ],
        "update",
        bands=mode_bands(metrics, phases),
        floor=0.0,
        ceiling=1.0,
    )


def mode_bands(metrics: Sequence[UpdateMetrics], phases: Sequence[Phase]) -> list[charts.Band]:
    """Stretches of updates by mode, for shading."""
    if not metrics or not phases:
        return []
    begun = [(phases[0].update, phases[0].mode)]
    begun += [(after.update, after.mode) for before, after in pairwise(phases) if before.mode != after.mode]
    ends = [update for update, _ in begun[1:]] + [metrics[-1].update]
    return [
        charts.Band(start=update, end=end, style=f"mode-{mode}", title=f"{mode}, updates {update} to {end}")
        for (update, mode), end in zip(begun, ends, strict=True)
        if end > update
    ]


def lag_chart(metrics: Sequence[UpdateMetrics], bound: int) -> str:
    """Trained trajectories by lag, with the bound."""
    counts: dict[int, int] = {lag: 0 for lag in range(bound + 1)} if metrics else {}
    for m in metrics:
        for lag, count in m.lag_counts.items():
            counts[int(lag)] = counts.get(int(lag), 0) + count
    shown = [(str(lag), float(counts[lag])) for lag in sorted(counts)]
    return charts.bars(
        "Trained trajectories by lag", shown, "lag in versions", marked=str(bound), width=charts.NARROW
    )


def phase_chart(phases: Sequence[Phase], start: float, end: float) -> str:
    """Mode, phase, and who is awake, over time."""
    stretches = [(phase, after.at) for phase, after in pairwise(phases)]
    if phases:
        stretches.append((phases[-1], end))

    def row(label: str, of: str) -> charts.Row:
        drawn = []
        for phase, until in stretches:
            text, style = {
                "mode": (phase.mode, f"mode-{phase.mode}"),
                "phase": (phase.phase, f"phase-{phase.phase}"),
                "rollout": (phase.rollout, f"{phase.rollout}"),
                "trainer": (phase.trainer, f"{phase.trainer}"),
            }[of]
            title = f"{text}, {charts.number(until - phase.at)} s, after update {phase.update}"
            inside = text if of != "mode" else ""
            drawn.append(charts.Bar(start=phase.at, end=until, style=style, title=title, text=inside))
        return charts.Row(label=label, bars=drawn)

    rows = [row(name, name) for name in ("mode", "phase", "rollout", "trainer")]
    return charts.timeline("Phases over time", rows, start, end)


def version_chart(versions: Sequence[VersionRecord], start: float, end: float) -> str:
    """Which version each worker served when; the first row is the way from minted to active."""
    ordered = sorted(versions, key=lambda record: record.version)
    way = [
        charts.Bar(
            start=v.minted,
            end=v.active or v.retired or v.published or v.minted,
            style="phase-sync" if v.active else "awake-none",
            title=f"version {v.version}: {v.state}, {charts.number((v.active or v.minted) - v.minted)} s",
        )
        for v in ordered
        if v.minted is not None
    ]
    rows = [charts.Row(label="on the way", bars=way)]
    for worker in sorted({name for v in ordered for name in v.workers})[:SHOWN_VERSION_ROWS]:
        rows.append(charts.Row(label=worker, bars=_served(ordered, worker, end)))
    return charts.timeline("Versions over time", rows, start, end)


def _served(ordered: Sequence[VersionRecord], worker: str, end: float) -> list[charts.Bar]:
    """The stretches in which `worker` served each version."""
    paths = [(v.workers[worker].active, v) for v in ordered if worker in v.workers]
    begun = [(at, v) for at, v in paths if at is not None]
    untils = [*(at for at, _ in begun), end][1:]  # a worker that was staged and never served has no stretch
    return [
        charts.Bar(
            start=at,
            end=until,
            style=f"version-{v.version.number % 2}",
            title=f"{worker} served version {v.version} ({v.digest[:12]}) for {charts.number(until - at)} s",
            text=str(v.version),
        )
        for (at, v), until in zip(begun, untils, strict=True)
    ]


def gap_chart(metrics: Sequence[UpdateMetrics]) -> str:
    """|trainer - rollout| log-prob by update: over all tokens, and over tokens of lag 0 alone."""
    everywhere = [(float(m.update), m.gap_mean) for m in metrics]
    fresh = [(float(m.update), m.same_version_gap) for m in metrics]
    lines = [
        charts.Line(label="all tokens", style="b", points=everywhere),
        charts.Line(label="tokens of lag 0", style="c", points=fresh),
    ]
    return charts.curves("Log-prob gap by update", lines, "update", floor=0.0, width=charts.NARROW)


def ledger_chart(evidence: Evidence, start: float) -> str:
    """Trajectories in flight over time."""
    points = [(s.at - start, s) for s in evidence.samples]
    return charts.curves(
        "Trajectories in flight over time",
        [
            charts.Line(label="running", style="a", points=[(at, s.running) for at, s in points]),
            charts.Line(label="buffered", style="b", points=[(at, s.buffered) for at, s in points]),
        ],
        "seconds",
        floor=0.0,
    )

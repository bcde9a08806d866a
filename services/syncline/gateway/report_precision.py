"""The report's pages on precision: mismatch beside staleness, the six-component trace, what was not measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from syncline.contract.diagnosis import TERMS, Diagnostics
from syncline.contract.events import UpdateMetrics
from syncline.contract.precision_trace import COMPONENTS, ComponentTrace
from syncline.contract.version_path import VersionRecord
from syncline.gateway import report_charts as charts
from syncline.gateway.diagnosed import DiagnosticsSummary

TITLES = {
    "total": "trainer against sampling",
    "mismatch": "same-version mismatch",
    "staleness": "staleness",
    "kv_cache": "KV cache of the contract against a wide one",
    "noise_staleness": "noise: staleness at lag 0",
    "noise_decode": "noise: decode against prefill",
}
_PARTS = {
    "rollout": "rollout",
    "fprop": "trainer FProp",
    "dgrad": "trainer DGrad",
    "wgrad": "trainer WGrad",
    "optimizer": "optimizer",
    "convert": "convert and synchronize",
}


def mismatch_chart(records: Sequence[Diagnostics]) -> str:
    """Mean and 99th percentile of |mismatch|, mean |staleness|, and the learned baseline, by update."""

    def term(name: str, figure: str) -> list[tuple[float, float | None]]:
        return [
            (float(r.update), float(getattr(r.terms[name], figure)) if name in r.terms else None)
            for r in records
        ]

    lines = [
        charts.Line(label="staleness, mean", style="b", points=term("staleness", "mean")),
        charts.Line(label="mismatch, p99", style="d", points=term("mismatch", "p99")),
        charts.Line(label="mismatch, mean", style="a", points=term("mismatch", "mean")),
        charts.Line(
            label="baseline of the mismatch",
            style="c",
            points=[(float(r.update), r.baseline) for r in records],
        ),
    ]
    return charts.curves("Mismatch and staleness by update", lines, "update", powers=True)


class TermRow(msgspec.Struct, frozen=True, kw_only=True):
    """One term over all measured updates, as text."""

    name: str
    figures: tuple[str, ...]  # tokens, mean, largest p99, largest; empty: never measured
    why: str  # why it is absent in the newest update; "" if it is there


def term_rows(summary: DiagnosticsSummary) -> list[TermRow]:
    """Every term, measured or not."""
    rows = []
    for name in TERMS:
        term = summary.terms.get(name)
        figures: tuple[str, ...] = ()
        if term is not None:
            figures = (str(term.tokens), *(charts.number(value) for value in (term.mean, term.p99, term.max)))
        rows.append(TermRow(name=TITLES[name], figures=figures, why=summary.unmeasured.get(name, "")))
    return rows


def other_rows(records: Sequence[Diagnostics]) -> list[tuple[str, str]]:
    """Figures of the newest measured update that are no term, and what of it was not measured and why."""
    if not records:
        return []
    r = next((r for r in reversed(records) if r.terms), records[-1])
    rows = [(f"KL(rollout, trainer), {name}", charts.number(value)) for name, value in r.kl.items()]
    rows += [(f"KL to the reference policy, {name}", charts.number(v)) for name, v in r.reference_kl.items()]
    for name, value in (
        ("tokens clipped", r.clip_fraction),
        ("tokens truncated or masked", r.truncated),
        ("effective sample size", r.effective_sample_size),
        ("tokens with mismatch exactly 0", r.exact),
    ):
        if value is not None:
            rows.append((name, charts.number(value)))
    if r.routes:
        rows.append(("routes equal, by layer", ", ".join(charts.number(share) for share in r.routes)))
        rows += [
            ("no layer diverges" if layer == "none" else f"layer {layer} diverges first", f"{count} tokens")
            for layer, count in r.diverging.items()
        ]
    rows += [(name, f"not measured: {why}") for name, why in r.unmeasured.items() if name not in TERMS]
    return rows


# ---- six components ---------------------------------------------------------------------------------------
class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one component made of one family. `uses` is empty where the component told nothing."""

    component: str
    family: str
    uses: tuple[str, ...]  # tensors, encoded, operands, kernel, accumulate, persistent, communicated


def traces(metrics: Sequence[UpdateMetrics], versions: Sequence[VersionRecord]) -> list[ComponentTrace]:
    """The newest trace of each component, in the seed's order; a component that told nothing is absent."""
    newest: dict[str, ComponentTrace] = {}
    for m in metrics:
        newest |= {trace.component: trace for trace in m.trace}
    for v in sorted(versions, key=lambda record: record.version):
        for trace in (v.rollout_trace, v.convert_trace):
            if trace is not None:
                newest[trace.component] = trace
    return [newest[name] for name in COMPONENTS if name in newest]


def trace_rows(found: Sequence[ComponentTrace]) -> list[TraceRow]:
    """Six components, each with a row per family; one that told nothing says so."""
    by_name = {trace.component: trace for trace in found}
    rows = []
    for name in COMPONENTS:
        trace = by_name.get(name)
        if trace is None:
            rows.append(TraceRow(component=_PARTS[name], family="", uses=()))
            continue
        for use in trace.uses:
            told = (use.encoded, use.operands, use.kernel, use.accumulate, use.persistent, use.communicated)
            rows.append(
                TraceRow(
                    component=_PARTS[name],
                    family=use.family or "the rest",
                    uses=(str(use.tensors), *(text or "–" for text in told)),
                )
            )
    return rows


def byte_rows(found: Sequence[ComponentTrace]) -> list[tuple[str, str, str]]:
    """(component, what bytes are for, how many) of everything that was held."""
    return [
        (_PARTS[trace.component], kind.replace("_", " "), f"{count:,}")
        for trace in found
        for kind, count in sorted(trace.bytes.items(), key=lambda pair: -pair[1])
    ]

"""A climb as one HTML file that needs nothing else. Pure."""

from __future__ import annotations

from html import escape

from syncline.contract.validation import TITLES, Check, Report, Result

STYLE = """
:root { --ink:#1d2530; --soft:#5b6675; --line:#dfe4ea; --page:#f6f7f9; --card:#fff; --good:#2b8a3e; --bad:#c92a2a; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6eaef; --soft:#9aa5b3; --line:#313945; --page:#14181e;
  --card:#1c222a; --good:#69db7c; --bad:#ff8787; } }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width:1080px; margin:0 auto; padding:20px; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:14px 18px; margin:14px 0; }
table { border-collapse:collapse; width:100%; } td, th { text-align:left; padding:3px 12px 3px 0; vertical-align:top; }
td.n { font-variant-numeric:tabular-nums; white-space:nowrap; } .soft { color:var(--soft); }
.good { color:var(--good); } .bad { color:var(--bad); font-weight:600; }
"""


HEAD = "<tr><th></th><th>check</th><th>found</th><th>at most</th><th>when it held</th><th></th><th>bound from</th></tr>"


def page(report: Report) -> str:
    """The whole climb as HTML."""
    title = f"Validation of {report.recipe} on {report.model}"
    said = report.diagnosis
    verdict = (
        '<p class="good">Every level that was climbed holds.</p>'
        if said is None
        else f'<p class="bad">Level {report.failed_at} fails.</p><p>{escape(said.symptom)}. Likely: '
        f"{escape(said.cause)}. Look at: {escape(said.check_next)}.</p>"
    )
    sections = "".join(_section(result) for result in report.results)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f'<p class="soft">contract {escape(report.contract[:12])}, seed {report.seed}, engine '
        f"{escape(report.engine)}</p>{verdict}{sections}"
        "</main></body></html>\n"
    )


def _section(result: Result) -> str:
    name, localizes = TITLES[result.level]
    word = '<span class="good">holds</span>' if result.holds else '<span class="bad">fails</span>'
    broke = f'<p class="bad">{escape(result.broke)}</p>' if result.broke else ""
    rows = "".join(map(_row, result.checks))
    table = (
        f"<table>{HEAD}{rows}</table>" if rows else '<p class="soft">Nothing in this recipe to compare.</p>'
    )
    return (
        f"<section><h2>{result.level}. {escape(name)}: {word}</h2>"
        f'<p class="soft">A failure here localizes {escape(localizes)}. {result.seconds:.1f} s{_file(result)}</p>'
        f"{broke}{table}</section>"
    )


def _row(check: Check) -> str:
    name = f'<td>{escape(check.name)}<br><span class="soft">{escape(check.where)}</span></td>'
    source = f'<td class="soft">{escape(check.source)}</td>'
    if not check.applies:
        return f'<tr><td class="soft">does not apply</td>{name}<td colspan="4"></td>{source}</tr>'
    word = '<td class="good">holds</td>' if check.holds else '<td class="bad">fails</td>'
    numbers = (
        f"{check.found:.3g}",
        f"{check.bound:.3g}",
        "" if check.baseline is None else f"{check.baseline:.3g}",
    )
    cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
    return f"<tr>{word}{name}{cells}<td>{escape(check.unit)}</td>{source}</tr>"


def _file(result: Result) -> str:
    name = escape(result.evidence)
    return f', figures: <a href="{name}">{name}</a>' if name else ""

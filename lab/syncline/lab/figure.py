"""The study's figure: one HTML file that needs nothing else, drawings as inline SVG, and an SVG for pages. Pure.

Upper drawing: a row per trainer variant, and side by side how far its policy is from rollout, how far from a BF16
forward of the same weights, and what reward it reached. Lower drawing: reward over updates. Small dots are seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from syncline.lab.findings import NAMES, Finding, Study, mean, short

ROW, HEAD, FOOT = 34, 40, 44
LABEL, PANEL, SPACE = 240, 204, 44
WIDTH = LABEL + 3 * (PANEL + SPACE)
LOWEST = 1e-9
"""Where logarithmic axes end: below it, differences are those of FP32 arithmetic. Zeros are drawn there."""
STYLES = {"unquantised": "n", "plain": "a", "forward_qdq": "b", "qdq": "c", "real": "d"}
CURVES_HIGH, CURVES_LEFT = 240, 48

STYLE = """
:root { --ink:#1d2530; --soft:#5b6675; --line:#dfe4ea; --page:#f6f7f9; --card:#fff; --a:#c2570c; --b:#0b7285;
  --c:#6741d9; --d:#2b8a3e; --n:#8b95a3; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6eaef; --soft:#9aa5b3; --line:#313945; --page:#14181e;
  --card:#1c222a; --a:#ff922b; --b:#3bc9db; --c:#b197fc; --d:#69db7c; --n:#7d8794; } }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width:1080px; margin:0 auto; padding:20px; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:14px 18px; margin:14px 0; }
p { color:var(--soft); margin:.2em 0 .8em; }
svg { display:block; width:100%; height:auto; }
svg text { fill:var(--soft); font-size:11px; } svg text.row { fill:var(--ink); font-size:12px; }
svg text.head { fill:var(--ink); font-size:12px; font-weight:600; }
.grid { stroke:var(--line); stroke-width:1; }
.fill-a { fill:var(--a); } .fill-b { fill:var(--b); } .fill-c { fill:var(--c); } .fill-d { fill:var(--d); }
.fill-n { fill:var(--n); } .seed { opacity:.45; }
.line-a { stroke:var(--a); } .line-b { stroke:var(--b); } .line-c { stroke:var(--c); } .line-d { stroke:var(--d); }
.line-n { stroke:var(--n); } polyline { fill:none; stroke-width:2; stroke-linejoin:round; }
ul { display:flex; flex-wrap:wrap; gap:.2em 1.2em; list-style:none; margin:.4em 0 0; padding:0; color:var(--soft); }
i { display:inline-block; width:12px; height:12px; border-radius:3px; margin-right:.4em; }
.dot-a { background:var(--a); } .dot-b { background:var(--b); } .dot-c { background:var(--c); }
.dot-d { background:var(--d); } .dot-n { background:var(--n); }
"""


def page(study: Study) -> str:
    """The whole HTML document."""
    legend = "".join(
        f'<li><i class="dot-{STYLES[f.variant]}"></i>{escape(NAMES[f.variant])}</li>' for f in study.findings
    )
    seeds = ", ".join(map(str, study.seeds))
    title = f"Trainer variants, rollout in {study.format}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>
<h1>{escape(title)}</h1>
<p>Recipe {escape(study.recipe)}; {study.updates} updates; seeds {seeds}. Large dots are means over seeds.</p>
<section>{_comparison(study)}
<p>Left: k3 estimate of KL(rollout, trainer) at one version, mean over updates. Middle: the trainer's policy against a
BF16 forward of the very same weights: what quantising the forward moves by itself. Right: mean reward of the last
{min(study.last, study.updates)} updates. Logarithmic axes end at 1e-9; an exact 0 is drawn there.</p></section>
<section>{_curves(study)}<ul>{legend}</ul><p>Mean reward of each update, mean over seeds, averaged over 5 updates.</p>
</section></main></body></html>
"""


def drawing(study: Study) -> str:
    """The upper drawing as an SVG file of its own."""
    inner = _comparison(study)
    opening, rest = inner.split(">", 1)
    return f'{opening} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{rest}\n'


def _comparison(study: Study) -> str:
    found = study.findings
    high = HEAD + ROW * len(found) + FOOT
    parts = [
        f'<text class="row" x="0" y="{_middle(i) + 4}">{escape(NAMES[f.variant])}</text>'
        for i, f in enumerate(found)
    ]
    parts += _panel(0, "agreement: KL to rollout", found, lambda f: f.kl_rollout_per_seed, _log_axis(found))
    parts += _panel(
        1, "movement: KL to BF16 reference", found, lambda f: f.kl_same_per_seed, _log_axis(found)
    )
    parts += _panel(2, "reward", found, lambda f: f.rewards, _linear_axis(found))
    return _svg("agreement with rollout, distance to BF16 and reward per variant", parts, WIDTH, high)


Axis = tuple[Callable[[float], float], Sequence[tuple[float, str]]]
"""Value to a share of the panel's width, and the ticks."""


def _log_axis(found: Sequence[Finding]) -> Axis:
    highest = max(max(*f.kl_rollout_per_seed, *f.kl_same_per_seed) for f in found)
    low = math.log10(LOWEST)
    top = max(math.ceil(math.log10(max(highest, LOWEST))), low + 1)
    ticks = [(10.0**power, f"1e{power}") for power in range(round(low), round(top) + 1, 2)]
    return (lambda value: (math.log10(max(value, LOWEST)) - low) / (top - low)), ticks


def _linear_axis(found: Sequence[Finding]) -> Axis:
    highest = max(max(f.rewards) for f in found)
    top = max(0.2, math.ceil(highest * 5) / 5)
    return (lambda value: value / top), [(0.2 * i, f"{0.2 * i:.1f}") for i in range(round(top / 0.2) + 1)]


def _panel(
    place: int,
    title: str,
    found: Sequence[Finding],
    values: Callable[[Finding], Sequence[float]],
    axis: Axis,
) -> list[str]:
    left = LABEL + place * (PANEL + SPACE) + SPACE / 2
    at, ticks = axis
    bottom = HEAD + ROW * len(found)
    parts = [f'<text class="head" x="{left:.1f}" y="16">{escape(title)}</text>']
    for value, label in ticks:
        x = left + at(value) * PANEL
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD - 12}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    for i, finding in enumerate(found):
        style, y = STYLES[finding.variant], _middle(i)
        for value in values(finding):
            x = left + at(value) * PANEL
            parts.append(f'<circle class="fill-{style} seed" cx="{x:.1f}" cy="{y}" r="3"/>')
        middle = mean(values(finding))
        x = left + at(middle) * PANEL
        told = escape(f"{NAMES[finding.variant]}: {short(middle)}")
        parts.append(
            f'<circle class="fill-{style}" cx="{x:.1f}" cy="{y}" r="6"><title>{told}</title></circle>'
        )
    return parts


def _middle(row: int) -> int:
    return HEAD + ROW * row + ROW // 2 - 6


def _curves(study: Study) -> str:
    high, right, bottom = CURVES_HIGH, WIDTH - SPACE, CURVES_HIGH - 26
    at, ticks = _linear_axis(study.findings)
    parts = []
    for value, label in ticks:
        y = bottom - at(value) * (bottom - 12)
        parts.append(f'<line class="grid" x1="{CURVES_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{CURVES_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    span = max(1, study.updates - 1)
    for update in range(0, study.updates + 1, max(1, study.updates // 6)):
        x = CURVES_LEFT + max(0, update - 1) / span * (right - CURVES_LEFT)
        parts.append(f'<text x="{x:.1f}" y="{high - 8}" text-anchor="middle">{max(1, update)}</text>')
    for finding in study.findings:
        rewards = _smoothed(study, finding.variant)
        points = " ".join(
            f"{CURVES_LEFT + i / span * (right - CURVES_LEFT):.1f},{bottom - at(value) * (bottom - 12):.1f}"
            for i, value in enumerate(rewards)
        )
        told = escape(NAMES[finding.variant])
        parts.append(
            f'<polyline class="line-{STYLES[finding.variant]}" points="{points}"><title>{told}</title></polyline>'
        )
    return _svg("reward over updates per variant", parts, WIDTH, high)


def _smoothed(study: Study, variant: str) -> list[float]:
    cells = [cell for cell in study.cells if cell.order.variant == variant]
    means = [mean([cell.points[i].reward for cell in cells]) for i in range(study.updates)]
    return [mean(means[max(0, i - 4) : i + 1]) for i in range(len(means))]


def _svg(title: str, parts: Sequence[str], width: int, high: int) -> str:
    return f'<svg viewBox="0 0 {width} {high}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'

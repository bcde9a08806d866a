"""Charts of the report as inline SVG. Pure; every text that goes in is escaped here.

A chart has a fixed `viewBox` and scales with the page. Colours are CSS classes of `templates/style.css`, so
that light and dark pages share one drawing. `<title>` elements give values to pointers and screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

import msgspec

WIDTH, NARROW, HEIGHT = 720, 460, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One curve: `points` are (x, y) in rising x; a y of None breaks the curve."""

    label: str
    style: str  # CSS class: "a", "b", "c", or "d" for one that stays behind the others
    points: Sequence[tuple[float, float | None]]
    ranges: Sequence[tuple[float, float, float]] = ()  # (x, lower end, upper end) of an interval at x


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch `[start, end)` of a timeline's row."""

    start: float
    end: float
    style: str
    title: str
    text: str = ""  # drawn inside when it fits


class Row(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    bars: Sequence[Bar]


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """A shaded stretch of the x axis behind curves."""

    start: float
    end: float
    style: str
    title: str


def curves(
    title: str,
    lines: Sequence[Line],
    x_name: str,
    *,
    bands: Sequence[Band] = (),
    floor: float | None = None,
    ceiling: float | None = None,
    width: int = WIDTH,
    powers: bool = False,
) -> str:
    """Line chart. `floor` and `ceiling` widen the y axis to at least these values.

    powers   a logarithmic y axis, for values above 0; one that is not breaks its curve
    """
    if powers:
        lines = [_logarithms(line) for line in lines]
    points = [(x, y) for line in lines for x, y in line.points if y is not None and math.isfinite(y)]
    points += [(x, end) for line in lines for x, *ends in line.ranges for end in ends]
    if not points:
        return _nothing(title)
    xs = [x for x, _ in points] + [edge for band in bands for edge in (band.start, band.end)]
    ys = [y for _, y in points] + [y for y in (floor, ceiling) if y is not None]
    x_axis = _Axis(min(xs), max(xs), LEFT, width - RIGHT)
    y_axis = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [_band(band, x_axis) for band in bands]
    parts += _grid(x_axis, y_axis, x_name, width, powers)
    parts += [_curve(line, x_axis, y_axis) for line in lines]
    return _svg(title, parts, width) + _legend((line.label, line.style) for line in lines)


def bars(
    title: str, counts: Sequence[tuple[str, float]], x_name: str, marked: str = "", width: int = WIDTH
) -> str:
    """Bar chart of `(label, value)`; the label `marked` is drawn as the bound."""
    if not counts:
        return _nothing(title)
    y_axis = _Axis(0.0, max(value for _, value in counts) or 1.0, HEIGHT - BOTTOM, TOP)
    step = (width - LEFT - RIGHT) / len(counts)
    parts = [_y_ticks(y_axis, width)]
    for i, (label, value) in enumerate(counts):
        x, y, told = LEFT + (i + 0.15) * step, y_axis.at(value), f"{label}: {number(value)}"
        parts.append(_rect("fill-a", x, y, step * 0.7, HEIGHT - BOTTOM - y, told))
        parts.append(_text(LEFT + (i + 0.5) * step, HEIGHT - BOTTOM + 14, label, "middle"))
        if label == marked:
            edge = LEFT + (i + 1) * step
            parts.append(
                f'<line class="bound" x1="{edge:.1f}" x2="{edge:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            )
            parts.append(_text(edge - 4, TOP + 10, "bound", "end"))
    parts.append(_text((LEFT + width - RIGHT) / 2, HEIGHT - 4, x_name, "middle"))
    return _svg(title, parts, width)


def timeline(title: str, rows: Sequence[Row], start: float, end: float) -> str:
    """Rows of bars from `start` to `end` (unix seconds); the axis shows seconds since `start`."""
    if not any(row.bars for row in rows) or end <= start:
        return _nothing(title)
    tall, left = 22, 96
    height = TOP + tall * len(rows) + BOTTOM
    axis = _Axis(0.0, end - start, left, WIDTH - RIGHT, exact=True)
    parts = []
    for tick in axis.ticks():
        x = axis.at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(_text(x, height - BOTTOM + 14, number(tick), "middle"))
    for i, row in enumerate(rows):
        y = TOP + i * tall
        parts.append(_text(left - 6, y + tall * 0.65, row.label, "end"))
        parts += [_bar(bar, axis, start, y, tall - 4) for bar in row.bars]
    parts.append(_text((left + WIDTH) / 2, height - 4, "seconds", "middle"))
    return _svg(title, parts, WIDTH, height)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """`(label, CSS class)` as a list of coloured marks."""
    return _legend(entries)


def number(value: float) -> str:
    """Short decimal form: 3 significant digits, no exponent between 0.001 and a million."""
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.1e}"


class _Axis:
    """Maps values of `[low, high]` to pixels; unless `exact`, the ends are widened to whole ticks."""

    def __init__(self, low: float, high: float, start: float, end: float, exact: bool = False) -> None:
        if high <= low:
            low, high = low - 0.5, low + 0.5
        rough = (high - low) / 5
        power = 10 ** math.floor(math.log10(rough))
        self.step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough * 0.999)
        self.low = low if exact else math.floor(low / self.step + 1e-9) * self.step
        self.high = high if exact else math.ceil(high / self.step - 1e-9) * self.step
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [i * self.step for i in range(first, last + 1)]


def _svg(title: str, parts: Sequence[str], width: int, height: float = HEIGHT) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(title)}">{body}</svg>'


def _nothing(title: str) -> str:
    return f'<p class="none" role="img" aria-label="{escape(title)}: no data">No data yet.</p>'


def _rect(style: str, x: float, y: float, wide: float, tall: float, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}"'
    return f'<rect class="{style}" {place}><title>{escape(title)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _logarithms(line: Line) -> Line:
    points = [(x, math.log10(y) if y is not None and y > 0 else None) for x, y in line.points]
    return Line(label=line.label, style=line.style, points=points)


def _grid(x_axis: _Axis, y_axis: _Axis, x_name: str, width: int, powers: bool = False) -> list[str]:
    bottom = HEIGHT - BOTTOM
    ticks = [_text(x_axis.at(tick), bottom + 14, number(tick), "middle") for tick in x_axis.ticks()]
    return [
        _y_ticks(y_axis, width, powers),
        *ticks,
        _text((LEFT + width - RIGHT) / 2, HEIGHT - 4, x_name, "middle"),
    ]


def _y_ticks(axis: _Axis, width: int, powers: bool = False) -> str:
    parts = []
    for tick in axis.ticks():
        y = axis.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, number(10**tick if powers else tick), "end"))
    return "".join(parts)


def _band(band: Band, axis: _Axis) -> str:
    x, end = axis.at(band.start), axis.at(band.end)
    return _rect(band.style, x, TOP, max(end - x, 0), HEIGHT - TOP - BOTTOM, band.title)


def _curve(line: Line, x_axis: _Axis, y_axis: _Axis) -> str:
    pieces: list[list[str]] = [[]]
    for x, y in line.points:
        if y is None or not math.isfinite(y):
            pieces.append([])
        else:
            pieces[-1].append(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}")
    drawn = []
    for piece in filter(None, pieces):
        if len(piece) == 1:
            at, height = piece[0].split(",")
            drawn.append(f'<circle class="fill-{line.style}" cx="{at}" cy="{height}" r="2.5"/>')
        else:
            drawn.append(f'<polyline class="line-{line.style}" points="{" ".join(piece)}"/>')
    for at_x, low, high in line.ranges:
        place, ends = x_axis.at(at_x), f'y1="{y_axis.at(low):.1f}" y2="{y_axis.at(high):.1f}"'
        drawn.append(f'<line class="line-{line.style}" x1="{place:.1f}" x2="{place:.1f}" {ends}/>')
    return f"<g><title>{escape(line.label)}</title>{''.join(drawn)}</g>"


def _bar(bar: Bar, axis: _Axis, origin: float, y: float, tall: float) -> str:
    x, end = axis.at(bar.start - origin), axis.at(bar.end - origin)
    wide = max(end - x, 0.6)
    drawn = _rect(bar.style, x, y, wide, tall, bar.title)
    if bar.text and wide > 7 * len(bar.text) + 4:
        drawn += f'<text class="in" x="{x + 4:.1f}" y="{y + tall * 0.72:.1f}">{escape(bar.text)}</text>'
    return drawn


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="dot-{style}"></i>{escape(label)}</li>' for label, style in entries)
    return f'<ul class="legend">{items}</ul>'

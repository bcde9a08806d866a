// Curves and timelines as SVG, drawn like the report's: named axes with units, and the same figures as a table.
import { el, fill, num, svg, table, NONE } from "./dom.js";

const HALF = 560, WIDE = 1140, HEIGHT = 240, LEFT = 60, RIGHT = 12, TOP = 24, BOTTOM = 36;

/**
 * A line chart that can be drawn anew. `series`: [{ label, style, points: [{ x, from, y, low, high }] }], y null where
 * there is nothing. `unit` names the y axis, `powers` makes it logarithmic, `floor` and `ceiling` widen it; `wide` is
 * for a plot that has a row of its own.
 */
export class Lines {
  constructor(title, { unit, xName, powers = false, floor = null, ceiling = null, wide = false }) {
    Object.assign(this, { title, unit, xName, powers, floor, ceiling, width: wide ? WIDE : HALF, series: [] });
    this.drawing = el("div", {});
    this.readout = el("p", { class: "readout" }, " ");
    this.rows = el("div", {});
    this.details = el("details", { ontoggle: () => this.tabulate() }, el("summary", {}, `${title} as a table`), this.rows);
    this.node = el("div", { class: "plot" }, this.drawing, this.readout, this.details);
  }

  update(series) {
    this.series = series;
    const value = y => y === null || (this.powers && y <= 0) ? null : this.powers ? Math.log10(y) : y;
    const drawn = series.map(one => ({ ...one, points: one.points.map(p => ({ ...p, y: value(p.y), low: value(p.low ?? p.y), high: value(p.high ?? p.y) })) }));
    const known = drawn.flatMap(one => one.points.filter(p => p.y !== null));
    this.tabulate();
    if (!known.length) { fill(this.drawing, el("p", { class: "none" }, "No data yet.")); return; }
    const all = known.flatMap(p => [p.low ?? p.y, p.high ?? p.y]).concat([this.floor, this.ceiling].filter(edge => edge !== null));
    this.x = axis(Math.min(...known.map(p => p.x)), Math.max(...known.map(p => p.x)), LEFT, this.width - RIGHT, true);
    this.y = axis(Math.min(...all), Math.max(...all), HEIGHT - BOTTOM, TOP);
    const told = `${this.title}, ${this.unit} by ${this.xName}. ${series.map(one => `${one.label}: ${lastOf(one)}`).join("; ")}`;
    const chart = svg("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, role: "img", "aria-label": told, onpointermove: event => this.point(event), onpointerleave: () => this.point(null) },
      grid(this), drawn.map(one => this.curve(one)));
    this.mark = svg("line", { class: "mark", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    chart.append(this.mark);
    fill(this.drawing, chart, legend(series.map(one => [one.label, one.style])));
  }

  curve({ label, style, points }) {
    const pieces = [[]];
    for (const p of points) if (p.y === null) pieces.push([]); else pieces[pieces.length - 1].push(p);
    const at = (p, y) => `${this.x.at(p.x).toFixed(1)},${this.y.at(y).toFixed(1)}`;
    return svg("g", {}, svg("title", {}, label), pieces.filter(piece => piece.length).flatMap(piece => {
      if (piece.length === 1) {
        const [cx, cy] = at(piece[0], piece[0].y).split(",");
        return svg("circle", { class: `fill-${style}`, cx, cy, r: "2.5" });
      }
      const wide = piece.some(p => p.low !== p.y || p.high !== p.y);
      const edge = [...piece.map(p => at(p, p.high ?? p.y)), ...piece.map(p => at(p, p.low ?? p.y)).reverse()].join(" ");
      return [wide ? svg("polygon", { class: `band fill-${style}`, points: edge }) : null,
        svg("polyline", { class: `line-${style}`, points: piece.map(p => at(p, p.y)).join(" ") })].filter(Boolean);
    }));
  }

  point(event) {
    if (!this.x) return;
    const box = this.drawing.firstChild.getBoundingClientRect();
    const xs = [...new Set(this.series.flatMap(one => one.points.map(p => p.x)))];
    if (event === null || !xs.length) { this.mark.setAttribute("visibility", "hidden"); this.readout.textContent = " "; return; }
    const at = (event.clientX - box.left) / box.width * this.width;
    const x = xs.reduce((best, one) => Math.abs(this.x.at(one) - at) < Math.abs(this.x.at(best) - at) ? one : best);
    for (const name of ["x1", "x2"]) this.mark.setAttribute(name, this.x.at(x).toFixed(1));
    this.mark.setAttribute("visibility", "visible");
    this.readout.textContent = `${this.xName} ${this.span(x)}: ${this.series.map(one => `${one.label} ${told(one.points.find(p => p.x === x))}`).join(", ")}`;
  }

  span(x) {
    const p = this.series.flatMap(one => one.points).find(one => one.x === x);
    return p && p.from !== undefined && p.from !== p.x ? `${p.from} to ${p.x}` : String(x);
  }

  tabulate() {
    if (!this.details.open) return;
    const xs = [...new Set(this.series.flatMap(one => one.points.map(p => p.x)))];
    const by = this.series.map(one => new Map(one.points.map(p => [p.x, p])));
    fill(this.rows, table(`${this.title} (${this.unit})`, [this.xName, ...this.series.map(one => one.label)],
      xs.map(x => [this.span(x), ...by.map(points => told(points.get(x)))])));
  }
}

const told = p => !p || p.y === null ? NONE :
  p.low !== undefined && p.low !== null && (p.low !== p.y || p.high !== p.y) ? `${num(p.y)} (${num(p.low)} to ${num(p.high)})` : num(p.y);
const lastOf = one => { const known = one.points.filter(p => p.y !== null); return known.length ? `last ${num(known[known.length - 1].y)}` : "no data"; };

/** Rows of bars: `rows` [{ label, bars: [{ start, end, style, title, text }] }] from `start` to `end`, unix seconds. */
export function timeline(title, rows, start, end) {
  if (start === null || end <= start || !rows.some(row => row.bars.length)) return el("p", { class: "none" }, "Nothing has happened yet.");
  const tall = 24, left = 96, height = TOP + tall * rows.length + BOTTOM, x = axis(0, end - start, left, WIDE - RIGHT, true);
  const chart = svg("svg", { viewBox: `0 0 ${WIDE} ${height}`, role: "img", "aria-label": `${title}, over ${num(end - start)} seconds` });
  for (const tick of x.ticks) {
    chart.append(svg("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: TOP, y2: height - BOTTOM }),
      svg("text", { x: x.at(tick), y: height - BOTTOM + 14, "text-anchor": "middle" }, num(tick)));
  }
  rows.forEach((row, i) => {
    const y = TOP + i * tall;
    chart.append(svg("text", { x: left - 6, y: y + tall * 0.62, "text-anchor": "end" }, row.label));
    for (const bar of row.bars) {
      const from = x.at(Math.max(bar.start - start, 0)), wide = Math.max(x.at(Math.min(bar.end, end) - start) - from, 0.8);
      chart.append(svg("rect", { class: bar.style, x: from.toFixed(1), y: y + 1, width: wide.toFixed(1), height: tall - 4 }, svg("title", {}, bar.title)));
      if (bar.text && wide > 7 * bar.text.length + 6) chart.append(svg("text", { class: "in", x: (from + 4).toFixed(1), y: y + tall * 0.62 }, bar.text));
    }
  });
  chart.append(svg("text", { x: (left + WIDE) / 2, y: height - 4, "text-anchor": "middle" }, "seconds"));
  return chart;
}

/** [[label, style], ...] as coloured marks. */
export function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(([label, style]) => el("li", {}, el("i", { class: `dot-${style}` }), label)));
}

function axis(low, high, start, end, exact = false) {
  if (high <= low) [low, high] = [low - 0.5, low + 0.5];
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(unit => power * unit).find(unit => unit >= rough * 0.999);
  if (!exact) [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  const ticks = Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  return { at: value => start + (value - low) / (high - low) * (end - start), ticks };
}

function grid({ x, y, xName, unit, powers, width }) {
  const bottom = HEIGHT - BOTTOM;
  return [
    ...y.ticks.flatMap(tick => [svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y.at(tick), y2: y.at(tick) }),
      svg("text", { x: LEFT - 6, y: y.at(tick) + 4, "text-anchor": "end" }, num(powers ? 10 ** tick : tick, 2))]),
    ...x.ticks.filter(Number.isInteger).map(tick => svg("text", { x: x.at(tick), y: bottom + 14, "text-anchor": "middle" }, num(tick))),
    svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, xName),
    svg("text", { x: 4, y: 12 }, unit),
  ];
}

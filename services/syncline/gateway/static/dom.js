// Elements, numbers and times. Text that came from anywhere only ever becomes a text node or an attribute's value.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes ("on..." are listeners; null and false are left out) and children (strings are text). */
export function el(name, attributes, ...children) {
  return dressed(document.createElement(name), attributes, children);
}

/** The same in SVG. */
export function svg(name, attributes, ...children) {
  return dressed(document.createElementNS(SVG, name), attributes, children);
}

function dressed(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter(child => child !== null && child !== undefined));
  return made;
}

/** Replace what is in `node`. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter(child => child !== null && child !== undefined));
}

export const NONE = "–";

/** At least `digits` significant digits, without needless zeros; none for what is not known. */
export function num(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  return String(Number(value.toPrecision(digits)));
}

/** Wall-clock time of unix seconds; with the date unless it is today. */
export function clock(at) {
  if (at === null || at === undefined) return NONE;
  const when = new Date(at * 1000), today = new Date().toDateString() === when.toDateString();
  return today ? when.toLocaleTimeString() : when.toLocaleString();
}

/** Seconds between two times, signed. */
export const since = (at, start) => at === null || at === undefined || start === null ? NONE : `+${(at - start).toFixed(3)}\u00a0s`;

export function bytes(count) {
  if (count === null || count === undefined) return NONE;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000 || unit === "GB") return `${num(count)}\u00a0${unit}`;
    count /= 1000;
  }
  return NONE;
}

export const chip = state => el("span", { class: `state state-${state}` }, state);

/** A table: `heads` are texts, `rows` lists of texts or nodes; the first of each row is its heading. */
export function table(caption, heads, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, heads.map(head => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map(([first, ...others]) =>
      el("tr", {}, el("th", { scope: "row" }, first), others.map(cell => el("td", {}, cell)))))));
}

/** Names and values side by side; a value of null leaves its pair out. */
export function facts(pairs) {
  return el("dl", { class: "pairs" }, pairs.filter(([, value]) => value !== null)
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** After `ms`, or at once when `signal` says that the page was left. */
export const pause = (ms, signal) => new Promise(done => {
  const timer = setTimeout(done, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
});

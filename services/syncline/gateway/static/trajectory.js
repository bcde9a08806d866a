// The token inspector: a trajectory's text by version, and for each token what sampled it and what became of it.
import { get } from "./api.js";
import { chip, el, facts, fill, num, since, table, NONE } from "./dom.js";
import { opened } from "./links.js";
import { brief, whole } from "./token.js";

const HUES = 6;  // colours of versions; `ui.css` has as many

export async function trajectoryPage(main, id, wanted, signal, tell) {
  const job = id.split("-")[0], path = `v1/jobs/${encodeURIComponent(job)}/trajectories/${encodeURIComponent(id)}`;
  document.getElementById("trajectory").value = id;
  const t = await get(path, signal);
  const versions = [...new Set(t.spans.map(span => span.version))];
  const panel = el("aside", { class: "token-panel", "aria-label": "Token" });
  const tokens = new Tokens(t, path, versions, panel, signal, tell);
  const trace = t.traceparent.split("-")[1];
  fill(main, el("h1", {}, t.trajectory),
    el("p", { class: "sub" }, chip(t.state), t.reason ? ` ${t.reason} ` : " ", el("a", { href: `#/job/${job}` }, `job ${job}`)),
    facts([["Reward", t.reward === null ? NONE : t.reward.state === "scored" ? num(t.reward.value) : `${t.reward.state}: ${t.reward.reason}`],
      ["Advantage", num(t.advantage)], ["Update", t.update === null ? "not claimed yet" : String(t.update)], ["Lag", t.lag === null ? NONE : String(t.lag)],
      ["Finish", t.finish], ["Attempt", String(t.attempt)], ["Log-probs", `${t.convention.logprob}, temperature ${num(t.convention.temperature)}`]]),
    el("div", { class: "inspector" }, el("div", { class: "told" },
      el("section", {}, el("h2", { id: "text-title" }, "Text"),
        el("p", { id: "keys" }, "Each token in the colour of the version that sampled it. Arrow keys go from token to token and line to line, ",
          "Page Up and Page Down from span to span; hovering shows a token, Enter or a click keeps it."),
        tokens.legend, tokens.list, tokens.more),
      el("section", {}, el("h2", {}, "Spans"), table("Which version sampled which tokens", ["Tokens", "Version", "Digest", "Worker", "Context", "Adapter"],
        t.spans.map(s => [`${s.start} to ${s.end - 1}`, s.version, s.digest.slice(0, 12), s.worker, s.context, s.adapter || NONE]))),
      el("section", {}, el("h2", {}, "Trace"), el("p", {}, "Trace ", el("code", {}, trace), " ", opened(`tempo/api/traces/${trace}`, "as JSON", `trace-${trace}.json`)),
        table("Hops, earlier attempts included", ["Hop", "By", "After", "Took", "Details"], t.hops.map(hop => [hop.hop, hop.instance || hop.service,
          since(hop.at, t.hops[0].at), hop.seconds === null ? NONE : `${num(hop.seconds * 1000)}\u00a0ms`,
          Object.entries(hop.attributes).filter(([name]) => name !== "trajectory").map(([name, value]) => `${name}=${String(value).slice(0, 24)}`).join(" ")])))),
      panel));
  await tokens.load();
  await tokens.begin(wanted);
}

/** The text, token by token: a listbox of which one token has the focus. */
class Tokens {
  constructor(t, path, versions, panel, signal, tell) {
    Object.assign(this, { t, path, versions, panel, signal, tell, rows: [], nodes: [], next: null, at: -1, paths: new Map(), asked: 0 });
    this.list = el("div", { class: "tokens", role: "listbox", "aria-labelledby": "text-title", "aria-describedby": "keys", "aria-orientation": "horizontal",
      onkeydown: event => this.key(event), onclick: event => this.chosen(event.target), onpointerover: event => this.hovered(event.target), onpointerleave: () => this.shown(this.at) });
    this.more = el("button", { type: "button", hidden: true, onclick: () => this.load() }, "More tokens");
    this.legend = el("ul", { class: "legend" }, versions.map((version, i) => el("li", {}, el("i", { class: `hue hue-${i % HUES}` }), `version ${version}`)),
      el("li", {}, el("i", { class: "hue prompt" }), "prompt"), t.segments.some(s => s.kind === "observed") ? el("li", {}, el("i", { class: "hue observed" }), "from a tool") : null);
  }

  async load() {
    const found = await get(`${this.path}/tokens?limit=500${this.next === null ? "" : `&after=${this.next}`}`, this.signal);
    this.next = found.next;
    this.more.hidden = found.next === null;
    this.more.textContent = `More tokens (${found.total - this.rows.length - found.items.length} left)`;
    for (const row of found.items) {
      const before = this.rows[this.rows.length - 1];
      const node = el("span", { role: "option", tabindex: "-1", "aria-selected": "false", class: this.style(row), "aria-label": label(row),
        "data-place": String(this.rows.length), "data-version": row.span !== null && (!before || before.span !== row.span) ? row.version : null }, shown(row));
      this.rows.push(row);
      this.nodes.push(node);
      this.list.append(node);
    }
  }

  style(row) {
    if (row.kind !== "sampled") return `token ${row.kind}`;
    return `token hue-${this.versions.indexOf(row.version) % HUES}${row.loss_mask ? "" : " masked"}`;
  }

  /** Token `wanted` (counts sampled tokens), else the first sampled one, without taking the focus unless asked for. */
  async begin(wanted) {
    const place = () => this.rows.findIndex(row => row.index === (wanted ?? 0));
    while (place() < 0 && this.next !== null) await this.load();
    const found = place();
    if (found < 0) { if (wanted !== null) this.tell(`There is no token ${wanted}.`); return; }
    await this.go(found, wanted !== null);
  }

  async go(place, focus = true) {
    while (place >= this.rows.length && this.next !== null) await this.load();
    place = Math.max(0, Math.min(place, this.rows.length - 1));
    if (this.at >= 0) { this.nodes[this.at].tabIndex = -1; this.nodes[this.at].setAttribute("aria-selected", "false"); }
    this.at = place;
    this.nodes[place].tabIndex = 0;
    this.nodes[place].setAttribute("aria-selected", "true");
    if (focus) this.nodes[place].focus();
    const index = this.rows[place].index;
    if (focus) history.replaceState(null, "", `#/trajectory/${this.t.trajectory}${index === null ? "" : `/token/${index}`}`);
    this.shown(place);
  }

  placeOf(node) {
    const token = node.closest?.("[data-place]");
    return token ? Number(token.dataset.place) : -1;
  }

  chosen(node) { const place = this.placeOf(node); if (place >= 0) this.go(place); }
  hovered(node) { const place = this.placeOf(node); if (place >= 0) this.shown(place); }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const to = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: this.rows.length - 1, Enter: this.at, " ": this.at,
      ArrowDown: this.line(1), ArrowUp: this.line(-1), PageDown: this.span(1), PageUp: this.span(-1) }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.go(to);
  }

  /** The token nearest below or above. */
  line(way) {
    const box = this.nodes[this.at].getBoundingClientRect(), middle = box.left + box.width / 2;
    let best = this.at, edge = null, least = Infinity;
    for (let i = this.at + way; i >= 0 && i < this.nodes.length; i += way) {
      const other = this.nodes[i].getBoundingClientRect();
      if (Math.abs(other.top - box.top) < 4 || other.width === 0) continue;
      edge ??= other.top;
      if (Math.abs(other.top - edge) >= 4) break;
      const apart = Math.abs(other.left + other.width / 2 - middle);
      if (apart < least) [best, least] = [i, apart];
    }
    return best;
  }

  /** The first token of the next span, or of this one or the one before. */
  span(way) {
    const first = i => this.rows[i].span !== null && (i === 0 || this.rows[i - 1].span !== this.rows[i].span);
    for (let i = this.at + way; i >= 0 && i < this.rows.length; i += way) if (first(i)) return i;
    return way > 0 ? this.rows.length - 1 : this.at;
  }

  /** What is known of a token: at once what its row says; its whole path once one has stayed on it. */
  async shown(place) {
    if (place < 0) return;
    const row = this.rows[place], asked = ++this.asked;
    fill(this.panel, brief(row, this.t));
    if (row.index === null) return;
    if (!this.paths.has(row.index)) {
      await new Promise(done => setTimeout(done, 150));
      if (asked !== this.asked || this.signal.aborted) return;
      try {
        this.paths.set(row.index, await get(`${this.path}/tokens/${row.index}`, this.signal));
      } catch (error) {
        if (!this.signal.aborted) this.tell(error.message);
        return;
      }
    }
    if (asked === this.asked) fill(this.panel, brief(row, this.t), whole(this.paths.get(row.index)));
  }
}

function shown(row) {
  if (row.text === null) return ` ${row.id} `;
  return row.text === "" ? "\u25cc" : row.text;
}

function label(row) {
  const text = row.text === null ? `id ${row.id}` : row.text.trim() === "" ? "space" : row.text;
  if (row.index === null) return `${row.kind} token ${text}`;
  const scored = row.ratio === null ? "" : `, ratio ${num(row.ratio)}, lag ${row.lag}`;
  return `token ${row.index}, ${text}, version ${row.version}, log-prob ${num(row.behaviour_logprob)}${scored}`;
}

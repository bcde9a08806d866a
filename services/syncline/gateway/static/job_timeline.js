// Phases and versions over a stretch of the run: the newest, or an earlier one.
import { get } from "./api.js";
import { bytes, clock, el, fill, num, since, table, NONE } from "./dom.js";
import { legend, timeline } from "./plots.js";

const PHASES = ["sample", "drain", "train", "sync", "flow", "paused", "done"];

export class Stretch {
  constructor(path, signal) {
    Object.assign(this, { path, signal, cursor: null, before: [] });
    this.drawing = el("div", {});
    this.earlier = el("button", { type: "button", hidden: true }, "Earlier");
    this.later = el("button", { type: "button", hidden: true, onclick: () => { this.before.pop(); this.load(); } }, "Later");
    this.versions = el("div", {});
    this.rows = el("div", {});
    this.details = el("details", { ontoggle: () => this.tabulate() }, el("summary", {}, "Phases and who served what, as tables"), this.rows);
    this.node = el("div", {}, this.drawing, el("p", { class: "actions" }, this.earlier, this.later), this.versions, this.details);
  }

  async load() {
    const before = this.before[this.before.length - 1];
    const found = await get(`${this.path}/timeline${before ? `?before=${before}` : ""}`, this.signal);
    if (before !== this.before[this.before.length - 1]) return;
    this.cursor = this.cursor ?? found.cursor;
    this.found = found;
    const end = found.end, modes = found.phases.map(p => bar(p, end, `mode-${p.mode}`, `${p.mode} from update ${p.update}`));
    const phases = found.phases.map(p => bar(p, end, `phase-${p.phase}`, `${p.phase} (${p.mode}), update ${p.update}, ${num((p.until ?? end) - p.at)} s`, p.phase));
    const workers = [...new Set(found.served.map(s => s.worker))].map(worker => ({ label: worker, bars: found.served.filter(s => s.worker === worker)
      .map(s => bar(s, end, `version-${Number(s.version.split(".")[1]) % 2}`, `${worker} served ${s.version} (${s.digest.slice(0, 12)}) for ${num((s.until ?? end) - s.at)} s`, s.version)) }));
    fill(this.drawing, timeline("Phases and versions", [{ label: "mode", bars: modes }, { label: "phase", bars: phases }, ...workers], found.start, end),
      legend(PHASES.filter(name => found.phases.some(p => p.phase === name)).map(name => [name, `phase-${name}`])));
    this.earlier.hidden = found.earlier === null;
    this.earlier.onclick = () => { this.before.push(found.earlier); this.load(); };
    this.later.hidden = !this.before.length;
    fill(this.versions, table("Versions, newest first: when each step was reached, counted from minting",
      ["Version", "State", "Minted", "Published", "Active on", "Bytes", "New bytes", "Digest"], [...found.versions].reverse().slice(0, 20).map(row)));
    this.tabulate();
  }

  tabulate() {
    if (!this.details.open || !this.found) return;
    const lasted = one => one.until === null ? "until now" : `${num(one.until - one.at)} s`;
    fill(this.rows,
      table("Phases", ["Order", "Phase", "Mode", "Update", "Began", "Lasted"], this.found.phases.map(p => [String(p.seq), p.phase, p.mode, String(p.update), clock(p.at), lasted(p)])),
      table("Served", ["Worker", "Version", "From", "Lasted"], this.found.served.map(s => [s.worker, s.version, clock(s.at), lasted(s)])));
  }
}

const bar = (one, end, style, title, text = "") => ({ start: one.at, end: one.until ?? end, style, title, text });

function row(v) {
  const active = Object.entries(v.workers).filter(([, w]) => w.active !== null).map(([worker, w]) => `${worker} ${since(w.active, v.minted)}`);
  return [v.version, v.reason ? `${v.state}: ${v.reason}` : v.state, clock(v.minted), since(v.published, v.minted), active.join(", ") || NONE,
    bytes(v.nbytes), bytes(v.new_bytes), v.digest.slice(0, 12) || NONE];
}

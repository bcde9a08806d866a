// One job: its progress, curves, phases and versions, ledger and waits, kept up to date by its event stream.
import { events, get, post, Problem } from "./api.js";
import { charts } from "./job_charts.js";
import { Stretch } from "./job_timeline.js";
import { trajectories } from "./job_trajectories.js";
import { chip, clock, el, facts, fill, num, pause, table } from "./dom.js";
import { progress } from "./jobs.js";
import { opened } from "./links.js";

const OVER = ["succeeded", "failed", "cancelled", "unrecorded"];
const STATES = ["submitted", "running", "buffered", "trained", "filtered", "failed", "expired"];

export async function jobPage(main, id, signal, tell) {
  const path = `v1/jobs/${encodeURIComponent(id)}`;
  let view = await get(path, signal);
  const head = el("div", {}), line = el("span", { class: "line", role: "status" }), said = el("p", { role: "status" });
  const ledger = el("div", {}), waits = el("div", {}), workers = el("div", {});
  const curves = charts(path, signal), stretch = new Stretch(path, signal), list = trajectories(path, signal, tell);
  const title = el("div", { class: "title" }, el("h1", {}, view.name), line), actions = el("p", { class: "actions" });
  fill(main, title, head, said, actions,
    section("Now", el("div", { class: "two" }, el("div", {}, el("h3", {}, "Ledger"), ledger), el("div", {}, el("h3", {}, "Waits"), waits)), el("h3", {}, "Rollout workers"), workers),
    el("div", { class: "two" }, section("Reward", curves.reward.node), section("Lag", curves.lag.node)),
    section("Mismatch and staleness", curves.about, curves.mismatch.node), section("Phases and versions", stretch.node), section("Trajectories", list.node));

  const parts = {
    async view() {
      view = await get(path, signal);
      fill(head, el("p", { class: "sub" }, chip(view.state), " ", el("code", {}, view.id), ` ${view.mode ? `${view.mode} / ${view.phase}` : ""} `, progress(view)),
        view.reason ? el("p", { class: "reason" }, view.reason) : null, view.alarm ? el("p", { class: "reason" }, `Alarm: ${view.alarm}`) : null,
        facts([["Reward of the last update", num(view.reward)], ["Created", clock(view.created)], ["Started", clock(view.started)], ["Ended", clock(view.ended)],
          ["Precision", view.precision ? `${view.precision.contract} (${view.precision.runs})` : null],
          ["Spec", el("details", {}, el("summary", {}, view.spec_hash.slice(0, 12)), el("pre", {}, JSON.stringify(view.spec, null, 2)))]]));
      fill(waits, view.waits.length ? table("What waits for what", ["Owner", "Waits for", "Since", "Deadline", "Detail"],
        view.waits.map(w => [w.owner, w.name, clock(w.since), clock(w.deadline), w.detail])) : el("p", { class: "none" }, "Nothing waits."));
      asked(view);
    },
    async ledger() { showLedger(await get(`${path}/ledger`, signal)); },
    async workers() {
      if (!view.recorded) { fill(workers, el("p", { class: "none" }, "This job's streams are gone.")); return; }
      const found = await get(`${path}/workers`, signal);
      fill(workers, table("Rollout workers as they see themselves", ["Worker", "State", "Version", "Staged", "Running", "Waiting", "Tokens/s"],
        found.items.map(w => [w.worker, w.why && w.why !== w.state ? `${w.state}: ${w.why}` : w.state, w.version ?? "–", w.staged ?? "–", String(w.running), String(w.waiting), num(w.tokens_per_second)])));
    },
    curves: () => curves.load(),
    stretch: () => stretch.load(),
    trajectories: () => list.load(),
  };
  function showLedger(sums) {
    fill(ledger, table("Trajectories by state", ["State", "Trajectories"], STATES.map(name => [name, String(sums[name])])),
      sums.holds ? null : el("p", { class: "reason" }, "The states do not add up to what was submitted."));
  }
  function asked(now) {
    const button = (verb, label, body) => el("button", { type: "button", onclick: () => ask(verb, body) }, label);
    const other = now.mode === "colocated" ? "disjoint" : "colocated";
    fill(actions, opened(`${path}/report`, "Report", `report-${id}.html`), opened(`${path}/summary`, "Summary", `summary-${id}.json`),
      ...(OVER.includes(now.state) ? [] : [now.state === "paused" ? button("resume", "Resume") : button("pause", "Pause"),
        now.mode ? button("mode", `Switch to ${other}`, JSON.stringify({ mode: other })) : null, button("cancel", "Cancel")]));
  }
  async function ask(verb, body) {
    if (verb === "cancel" && !window.confirm("End this job now?")) return;
    try {
      await post(`${path}/${verb}`, body, body ? { "content-type": "application/json" } : {});
      said.textContent = `Asked: ${verb}.`;
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      said.textContent = error.message;
    }
  }

  const keeper = new Keeper(parts, signal, tell);
  await stretch.load();  // first: its cursor is where the events go on, and what is read later misses none of them
  await keeper.all();
  if (!view.recorded) { line.textContent = "from the record"; return; }
  if (!OVER.includes(view.state)) keeper.every("view", 2000, () => !OVER.includes(view.state));
  await live(path, stretch.cursor, signal, line, keeper, showLedger);
}

const section = (name, ...parts) => el("section", {}, el("h2", {}, name), parts);

async function live(path, cursor, signal, line, keeper, showLedger) {
  for await (const event of events(`${path}/events`, cursor, signal, state => { line.textContent = state; })) {
    if (event.name === "metrics") keeper.want("curves", "view");
    else if (event.name === "phase") keeper.want("stretch", "view");
    else if (event.name === "ledger") { showLedger(event.data); keeper.want("workers"); }
    else if (event.name === "state") keeper.want("view");
    else if (event.name === "event" && ["minted", "active", "worker_lost"].includes(event.data.type)) keeper.want("stretch");
    else if (event.name === "end") { await keeper.all(); line.textContent = "ended"; return; }
  }
}

/** Reloads parts that changed: each at most once a second, and a slow one at most a fifth of the time. */
class Keeper {
  constructor(parts, signal, tell) { Object.assign(this, { parts, signal, tell, wanted: new Set(), busy: new Set(), over: false }); }

  async all() {
    this.over = true;
    await Promise.all(Object.values(this.parts).map(load => load()));
    this.over = false;
  }

  want(...names) {
    for (const name of names) {
      this.wanted.add(name);
      if (!this.busy.has(name)) this.keep(name);
    }
  }

  async keep(name) {
    this.busy.add(name);
    while (this.wanted.delete(name) && !this.signal.aborted && !this.over) {
      const began = performance.now();
      try {
        await this.parts[name]();
        this.tell("");
      } catch (error) {
        if (this.signal.aborted) break;
        if (!(error instanceof Problem || error instanceof TypeError)) throw error;
        this.tell(error instanceof Problem ? error.message : "The gateway cannot be reached. Trying again.");
      }
      await pause(Math.max(1000, 4 * (performance.now() - began)), this.signal);
    }
    this.busy.delete(name);
  }

  async every(name, ms, needed) {
    while (!this.signal.aborted && needed()) { await pause(ms, this.signal); this.want(name); }
  }
}

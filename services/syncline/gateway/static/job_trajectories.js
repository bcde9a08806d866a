// A job's trajectories in pages, by state and by the update that consumed them.
import { get, Problem } from "./api.js";
import { el, fill, table, NONE } from "./dom.js";

const STATES = ["running", "buffered", "trained", "filtered", "failed", "expired"];

export function trajectories(path, signal, tell) {
  const rows = el("div", {}), more = el("button", { type: "button", hidden: true }, "More");
  const state = el("select", { onchange: load }, el("option", { value: "" }, "any"), STATES.map(name => el("option", { value: name }, name)));
  const update = el("input", { type: "number", min: "1", step: "1", inputmode: "numeric", onchange: load });
  const node = el("div", {}, el("p", { class: "actions" }, el("label", {}, "State ", state), el("label", {}, "Update ", update)), rows, more);
  let items = [];

  async function page(after) {
    const asked = new URLSearchParams({ limit: "20" });
    if (state.value) asked.set("state", state.value);
    if (update.value) asked.set("update", update.value);
    if (after) asked.set("after", after);
    const found = await get(`${path}/trajectories?${asked}`, signal);
    items = after ? [...items, ...found.items] : found.items;
    fill(rows, items.length ? table("By group and index", ["Trajectory", "State", "Attempt", "Update", "Reason"], items.map(t => [
      el("a", { href: `#/trajectory/${t.trajectory}` }, t.trajectory), t.state, t.attempt === null ? NONE : String(t.attempt),
      t.update === null ? NONE : String(t.update), t.reason])) : el("p", { class: "none" }, "None."));
    more.hidden = found.next === null;
    more.onclick = () => guarded(() => page(found.next));
  }
  async function guarded(work) {
    try { await work(); } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      tell(error.message);
    }
  }
  function load() { return guarded(() => page("")); }
  return { node, load };
}

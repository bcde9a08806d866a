// All jobs, newest first, looked at again every two seconds.
import { get, Problem } from "./api.js";
import { chip, clock, el, fill, num, pause, NONE, table } from "./dom.js";

const HEADS = ["Job", "Name", "State", "Mode", "Progress", "Reward", "Created"];
const PAGE = 50;

export async function jobsPage(main, signal, tell) {
  let pages = 1;
  const box = el("section", { "aria-labelledby": "jobs-title" }), list = el("div", {}, "Loading.");
  const more = el("button", { type: "button", hidden: true, onclick: () => { pages += 1; show(); } }, "More");
  box.append(el("h2", { id: "jobs-title" }, "Newest first"), list, more);
  fill(main, el("h1", {}, "Jobs"), box);
  let shown = "";

  async function show() {
    const items = [];
    let next = "";
    for (let i = 0; i < pages && next !== null; i += 1) {
      const page = await get(`v1/jobs?limit=${PAGE}${next && `&after=${encodeURIComponent(next)}`}`, signal);
      items.push(...page.items);
      next = page.next;
    }
    const now = JSON.stringify(items);
    if (now === shown) return;
    shown = now;
    const focused = document.activeElement?.getAttribute("href");
    fill(list, items.length ? table("Jobs", HEADS, items.map(row)) :
      el("p", {}, "No job yet. ", el("a", { href: "#/submit" }, "Submit one"), "."));
    more.hidden = next === null;
    if (focused) list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  }

  while (!signal.aborted) {
    try {
      await show();
      tell("");
    } catch (error) {
      if (signal.aborted || (error instanceof Problem ? !error.passes : !(error instanceof TypeError))) throw error;
      tell(`${error instanceof Problem ? error.message : "The gateway cannot be reached"}. Trying again.`);
    }
    await pause(2000, signal);
  }
}

function row(job) {
  return [
    el("a", { href: `#/job/${job.id}` }, job.id), job.name,
    [chip(job.state), job.alarm ? el("span", { class: "bad", title: job.alarm }, " alarm") : null],
    job.mode ? `${job.mode} / ${job.phase}` : NONE, progress(job), num(job.reward), clock(job.created),
  ].map(cell => Array.isArray(cell) ? el("span", {}, cell) : cell);
}

/** Updates made of those asked for, as a bar with its words. */
export function progress(job) {
  const said = `${job.update} of ${job.updates} updates`;
  return el("span", { class: "progress" }, el("progress", { value: String(job.update), max: String(job.updates), "aria-label": said }), ` ${job.update} / ${job.updates}`);
}

"use strict";
const main = document.getElementById("main"), said = document.getElementById("said");
let leave = new AbortController();

// ---- the API --------------------------------------------------------------------------------------------
async function ask(path, signal) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const headers = token ? { authorization: "Bearer " + token } : {};
    const answer = await fetch(path, { headers, signal });
    if (answer.ok) { said.textContent = ""; return answer; }
    if (answer.status === 401) {
      const given = window.prompt("This gateway asks for a token");
      if (!given) throw new Error("no token given");
      sessionStorage.setItem("token", given);
      continue;
    }
    let detail = answer.status + " " + answer.statusText;
    try { detail = (await answer.json()).detail || detail; } catch (e) { /* not JSON: the status says enough */ }
    throw new Error(detail);
  }
}
const get = async (path, signal) => (await ask(path, signal)).json();

async function all(path, signal) {
  let items = [], after = "";
  for (;;) {
    const page = await get(path + "?limit=500" + (after && "&after=" + encodeURIComponent(after)), signal);
    items = items.concat(page.items);
    if (page.next === null) return items;
    after = page.next;
  }
}

// server-sent events over fetch, since EventSource cannot send a token
async function* events(path, signal) {
  const reader = (await ask(path, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", name = "", data = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n|\r/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") { if (data) yield { name, data: JSON.parse(data) }; name = data = ""; }
      else if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line.startsWith("data:")) data += line.slice(5).trim();
    }
  }
}

// ---- elements -------------------------------------------------------------------------------------------
function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}
const fill = (node, ...children) => node.replaceChildren(...children.filter(child => child !== null));
const SVG = "http://www.w3.org/2000/svg";
function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) { const title = document.createElementNS(SVG, "title"); title.textContent = text; made.append(title); }
  return made;
}
const num = (value, digits) => value === null || value === undefined ? "–" : Number(value).toPrecision(digits || 3).replace(/\.?0+$/, "");
const clock = at => at === null ? "–" : new Date(at * 1000).toLocaleTimeString();
const state = name => el("span", { class: "state state-" + name }, name);
const table = (caption, heads, rows) => el("div", { class: "scroll" }, el("table", {},
  el("caption", {}, caption),
  el("thead", {}, el("tr", {}, ...heads.map(head => el("th", { scope: "col" }, head)))),
  el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map(cell => el("td", {}, cell)))))));

// ---- pages ----------------------------------------------------------------------------------------------
async function jobs(signal) {
  const box = el("section", {}, el("h2", {}, "Jobs"), el("p", {}, "Loading."));
  main.replaceChildren(el("h1", {}, "Jobs"), box);
  while (!signal.aborted) {
    const page = await get("/v1/jobs?limit=100", signal);
    const rows = page.items.map(j => [el("a", { href: "#/job/" + j.id }, j.id), j.name, state(j.state), j.mode || "–",
      j.update + " / " + j.updates, num(j.reward), clock(j.created)]);
    box.replaceChildren(rows.length ? table("Newest first", ["Job", "Name", "State", "Mode", "Updates", "Reward", "Created"], rows)
      : el("p", {}, "No job yet. Submit one: syncline submit examples/quickstart.toml"));
    await pause(2000, signal);
  }
}

async function job(id, signal) {
  const head = el("div", {}), chart = el("div", {}), now = el("div", {}), line = el("div", {}), list = el("div", {});
  const path = "/v1/jobs/" + encodeURIComponent(id);
  main.replaceChildren(head, el("section", {}, el("h2", {}, "Now"), now), el("section", {}, el("h2", {}, "Reward"), chart),
    el("section", {}, el("h2", {}, "Versions"), line), el("section", {}, el("h2", {}, "Trajectories"), list));
  let metrics = [], view = await get(path, signal);
  const draw = async () => {
    view = await get(path, signal);
    fill(head, el("h1", {}, view.name), el("p", { class: "sub" }, state(view.state), " " + view.id + ", update " +
      view.update + " of " + view.updates + ", " + (view.mode || "–") + " / " + (view.phase || "–") + " "), view.reason ? el("p", { class: "reason" }, view.reason) : null,
      el("p", {}, el("a", { href: path + "/report" }, "Report"), " · ", el("a", { href: path + "/summary" }, "Summary")));
    if (!view.recorded) { now.replaceChildren(el("p", {}, "This job's streams are gone; its report has what was kept.")); return; }
    const [workers, ledger] = await Promise.all([get(path + "/workers", signal), get(path + "/ledger", signal)]);
    const rows = workers.items.map(w => [w.worker, w.state, w.version || "–", w.staged || "–", String(w.running), num(w.tokens_per_second)]);
    const kept = ["submitted", "running", "buffered", "trained", "filtered", "failed", "expired"].map(name => name + " " + ledger[name]).join(", ");
    const waits = view.waits.map(w => el("p", {}, "Waits: " + w.owner + " for " + w.name + ", " + w.detail));
    now.replaceChildren(el("p", {}, "Ledger: " + kept), ...waits, table("Rollout workers", ["Worker", "State", "Version", "Staged", "Running", "Tokens/s"], rows));
  };
  const drawVersions = async () => { line.replaceChildren(timeline(await get(path + "/versions", signal))); };
  const drawTrajectories = async () => {
    const page = await get(path + "/trajectories?limit=50", signal);
    list.replaceChildren(table("The first " + page.items.length, ["Trajectory", "State", "Attempt", "Update"], page.items.map(t =>
      [el("a", { href: "#/trajectory/" + t.trajectory }, t.trajectory), t.state, String(t.attempt), t.update === null ? "–" : String(t.update)])));
  };
  await draw(); await drawVersions(); await drawTrajectories();
  if (!view.recorded) return;
  metrics = await all(path + "/metrics", signal);
  chart.replaceChildren(curve(metrics));
  let drawn = 0;
  for await (const event of events(path + "/events", signal)) {
    if (event.name === "metrics") { metrics = metrics.filter(m => m.update !== event.data.update); metrics.push(event.data); }
    if (event.name === "end" || performance.now() - drawn > 700) {
      drawn = performance.now();
      chart.replaceChildren(curve(metrics)); await draw(); await drawVersions();
    }
    if (event.name === "end") { chart.replaceChildren(curve(metrics)); await drawTrajectories(); return; }
  }
}

function curve(metrics) {
  const points = metrics.filter(m => m.reward !== null).sort((a, b) => a.update - b.update);
  if (!points.length) return el("p", { class: "none" }, "No update yet.");
  const last = points[points.length - 1], high = Math.max(1, ...points.map(m => m.reward)), low = Math.min(0, ...points.map(m => m.reward));
  const x = m => 40 + (m.update / Math.max(1, last.update)) * 670, y = r => 170 - (r - low) / (high - low) * 155;
  const drawing = svg("svg", { viewBox: "0 0 720 200", role: "img", "aria-label": "Reward by update, now " + num(last.reward) });
  for (const tick of [low, (low + high) / 2, high]) {
    drawing.append(svg("line", { class: "grid", x1: 40, x2: 710, y1: y(tick), y2: y(tick) }));
    const text = svg("text", { x: 34, y: y(tick) + 4, "text-anchor": "end" }); text.textContent = num(tick, 2); drawing.append(text);
  }
  for (const update of [0, last.update]) {
    const text = svg("text", { x: x({ update }), y: 192, "text-anchor": update ? "end" : "middle" });
    text.textContent = update ? "update " + update : "0"; drawing.append(text);
  }
  drawing.append(svg("polyline", { class: "line-a", points: points.map(m => x(m).toFixed(1) + "," + y(m.reward).toFixed(1)).join(" ") }));
  return el("div", {}, drawing, el("p", {}, "Update " + last.update + ": reward " + num(last.reward) + ", lag at most " + last.lag_max + ", " + last.mode));
}

function timeline(listing) {
  const known = listing.items.filter(v => v.minted !== null);
  if (!known.length) return el("p", { class: "none" }, "No version yet.");
  const workers = [...new Set(known.flatMap(v => Object.keys(v.workers)))].sort();
  const times = known.flatMap(v => [v.minted, v.active, ...Object.values(v.workers).map(w => w.active)]).filter(at => at !== null);
  const start = Math.min(...times), end = Math.max(...times) + 1, x = at => 60 + (at - start) / (end - start) * 650;
  const drawing = svg("svg", { viewBox: "0 0 720 " + (24 + 24 * workers.length), role: "img", "aria-label": "Which version each worker served when" });
  workers.forEach((worker, row) => {
    const label = svg("text", { x: 54, y: 24 * row + 20, "text-anchor": "end" }); label.textContent = worker; drawing.append(label);
    const served = known.filter(v => v.workers[worker] && v.workers[worker].active !== null).sort((a, b) => a.workers[worker].active - b.workers[worker].active);
    served.forEach((v, i) => {
      const from = v.workers[worker].active, until = i + 1 < served.length ? served[i + 1].workers[worker].active : end;
      drawing.append(svg("rect", { class: "version-" + (Number(v.version.split(".")[1]) % 2), x: x(from), y: 24 * row + 6, width: Math.max(0.6, x(until) - x(from)), height: 18 },
        worker + " served " + v.version + " for " + num(until - from) + " s"));
    });
  });
  const rows = known.slice(-8).reverse().map(v => [v.version, v.state, v.digest.slice(0, 12) || "–", clock(v.minted), v.active === null ? "–" : num(v.active - v.minted) + " s"]);
  return el("div", {}, drawing, table("The newest", ["Version", "State", "Digest", "Minted", "To active"], rows));
}

async function trajectory(id, signal) {
  const path = "/v1/jobs/" + encodeURIComponent(id.split("-")[0]) + "/trajectories/" + encodeURIComponent(id);
  document.getElementById("trajectory").value = id;
  const t = await get(path, signal);
  const sampled = t.segments.filter(s => s.kind === "sampled").flatMap(s => t.tokens.slice(s.start, s.end));
  const versions = [...new Set(t.spans.map(s => s.version))];
  const inspector = el("section", { "aria-live": "polite" }, el("h2", {}, "Token"), el("p", {}, "Choose a token to see its path."));
  const chips = sampled.map((token, i) => {
    const span = t.spans.find(s => s.start <= i && i < s.end);
    return el("button", { type: "button", class: "v" + versions.indexOf(span.version) % 4, "aria-pressed": "false", title: "token " + i + ", version " + span.version,
      onclick: event => choose(event.currentTarget, i) }, String(token));
  });
  async function choose(button, i) {
    for (const chip of chips) chip.setAttribute("aria-pressed", String(chip === button));
    try { inspector.replaceChildren(...tokenPath(await get(path + "/tokens/" + i, signal))); } catch (error) { tell(error); }
  }
  const spans = t.spans.map(s => ["[" + s.start + ", " + s.end + ")", s.version, s.digest.slice(0, 12), s.worker, s.context]);
  main.replaceChildren(el("h1", {}, t.trajectory),
    el("p", { class: "sub" }, state(t.state), " reward " + (t.reward ? num(t.reward.value) : "–") + ", " + (t.update === null ? "not trained" : "update " + t.update + ", lag " + t.lag)),
    el("section", {}, el("h2", {}, "Response"), el("pre", {}, t.text), el("p", {}, "Sampled tokens; the line under each is its version."), el("div", { class: "tokens" }, ...chips)),
    inspector, el("section", {}, el("h2", {}, "Spans"), table("What sampled which tokens", ["Tokens", "Version", "Digest", "Worker", "Context"], spans)),
    el("section", {}, el("h2", {}, "Path"), hops(t.hops, [])));
}

function tokenPath(t) {
  const parts = [el("h2", {}, "Token " + t.token.index + (t.token.text === null ? "" : " “" + t.token.text + "”")),
    el("p", {}, "Sampled under version " + t.span.version + " (" + t.span.digest.slice(0, 12) + ") on " + t.span.worker + ", context " + t.span.context +
      ". Log-prob " + num(t.behaviour_logprob, 5) + (t.trainer_logprob === null ? "" : ", by the trainer " + num(t.trainer_logprob, 5)) + "."),
    hops(t.hops, t.missing)];
  if (t.version) parts.push(el("h2", {}, "Version " + t.version.record.version), hops(t.version.path, []));
  return parts;
}

function hops(list, missing) {
  const first = list.find(h => h.at !== null);
  return el("ol", { class: "hops" }, ...list.map(h => el("li", {}, el("b", {}, h.hop), " " + (h.at === null ? "" : "+" + (h.at - first.at).toFixed(3) + " s ") +
    (h.seconds === null ? "" : "(" + (1000 * h.seconds).toFixed(1) + " ms) "), h.instance || h.service, el("br"),
    el("small", {}, Object.entries(h.attributes).map(([key, value]) => key + "=" + String(value).slice(0, 24)).join("  ")))),
    ...missing.map(name => el("li", { class: "missing" }, name + ": not reached, or no record of it")));
}

// ---- going from page to page ----------------------------------------------------------------------------
const pause = (ms, signal) => new Promise(done => { const timer = setTimeout(done, ms); signal.addEventListener("abort", () => { clearTimeout(timer); done(); }); });
function tell(error) { if (error.name !== "AbortError") said.textContent = error.message; }

async function go() {
  leave.abort(); leave = new AbortController();
  const signal = leave.signal, [, kind, id] = (location.hash || "#/").split("/");
  said.textContent = "";
  while (!signal.aborted) {
    try {
      if (kind === "job") await job(decodeURIComponent(id), signal);
      else if (kind === "trajectory") await trajectory(decodeURIComponent(id), signal);
      else await jobs(signal);
      return;
    } catch (error) {
      if (signal.aborted) return;
      tell(error);
      if (!(error instanceof TypeError)) return;  // TypeError: the gateway is away; try again
      await pause(2000, signal);
    }
  }
}
document.getElementById("find").addEventListener("submit", event => {
  event.preventDefault();
  const wanted = document.getElementById("trajectory").value.trim();
  if (wanted) location.hash = "#/trajectory/" + encodeURIComponent(wanted);
});
window.addEventListener("hashchange", () => { go(); main.focus(); });
go();

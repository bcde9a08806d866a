// From page to page: what stands behind `#` says which; each page lives until the next, by its AbortSignal.
import { onUnauthorized, Problem, token } from "./api.js";
import { el, fill, pause } from "./dom.js";
import { jobPage } from "./job.js";
import { jobsPage } from "./jobs.js";
import { submitPage } from "./submit.js";
import { trajectoryPage } from "./trajectory.js";

const by = id => document.getElementById(id);
const main = by("main"), said = by("said");
let leave = new AbortController();

function tell(text) { said.textContent = text; }

function pageOf(parts) {
  const [kind, id, ...rest] = parts;
  if (kind === "job" && id) return signal => jobPage(main, id, signal, tell);
  if (kind === "trajectory" && id) return signal => trajectoryPage(main, id, rest[0] === "token" ? Number(rest[1]) : null, signal, tell);
  if (kind === "submit") return () => submitPage(main);
  return signal => jobsPage(main, signal, tell);
}

async function go() {
  leave.abort();
  leave = new AbortController();
  const signal = leave.signal;
  let parts = [];
  try { parts = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent); } catch { /* no such page: the jobs */ }
  tell("");
  document.title = parts[1] ? `${parts[1]} · syncline` : "syncline";
  by("leave").hidden = token.get() === null;
  while (!signal.aborted) {
    try {
      await pageOf(parts)(signal);
      return;
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && !error.passes) { fill(main, el("h1", {}, "Nothing to show")); tell(error.message); return; }
      if (!(error instanceof Problem || error instanceof TypeError)) throw error;
      tell(`${error instanceof Problem ? error.message : "The gateway cannot be reached"}. Trying again.`);
      await pause(2000, signal);
    }
  }
}

// ---- the token ------------------------------------------------------------------------------------------
let asking = null;
onUnauthorized(refused => {
  asking ??= ask(refused).finally(() => { asking = null; });
  return asking;
});

function ask(refused) {
  const dialog = by("login");
  by("login-said").textContent = refused ? "That token was refused." : "";
  by("token").value = "";
  return new Promise(done => {
    const closed = () => {
      const given = dialog.returnValue === "given" ? by("token").value : "";
      by("token").value = "";
      if (given) token.set(given);
      by("leave").hidden = token.get() === null;
      done(given !== "");
    };
    dialog.returnValue = "";
    dialog.addEventListener("close", closed, { once: true });
    dialog.showModal();
  });
}
by("login-form").addEventListener("submit", event => { event.preventDefault(); by("login").close("given"); });
by("leave").addEventListener("click", () => { token.set(null); location.hash = "#/"; go(); });

// ---- the header -----------------------------------------------------------------------------------------
by("find").addEventListener("submit", event => {
  event.preventDefault();
  const wanted = by("trajectory").value.trim();
  if (wanted) location.hash = `#/trajectory/${encodeURIComponent(wanted)}`;
});
by("theme").value = document.documentElement.dataset.theme || "";
by("theme").addEventListener("change", () => {
  const chosen = by("theme").value;
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("theme", chosen); } catch { /* it holds for this page */ }
});
by("skip").addEventListener("click", event => { event.preventDefault(); main.focus(); });
window.addEventListener("hashchange", () => { go(); main.focus({ preventScroll: true }); window.scrollTo(0, 0); });
go();

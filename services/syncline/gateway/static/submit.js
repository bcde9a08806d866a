// A spec, pasted or chosen as TOML or JSON. What is wrong with it is shown below it, key by key, with its hint.
import { get, post, Problem } from "./api.js";
import { el, fill } from "./dom.js";

export async function submitPage(main) {
  const text = el("textarea", { id: "spec", rows: "18", spellcheck: "false", "aria-describedby": "spec-said", oninput: changed });
  const file = el("input", { id: "file", type: "file", accept: ".toml,.json,application/json,application/toml", onchange: chosen });
  const said = el("div", { id: "spec-said", role: "alert" });
  const button = el("button", { class: "main" }, "Submit");
  const form = el("form", { class: "spec", onsubmit: submitted },
    el("label", { for: "file" }, "Choose a file"), file,
    el("label", { for: "spec" }, "Or write the spec here, as TOML or JSON"), text, said, el("p", {}, button));
  const models = el("p", {});
  fill(main, el("h1", {}, "Submit a job"), el("section", {}, el("h2", {}, "Spec"), models, form));
  let key = fresh();
  const known = await get("v1/models");
  fill(models, known.items.length ? `Models here: ${known.items.join(", ")}.` : "There is no model under the model root.");
  if (text.value === "") text.value = example(known.items[0] || "MODEL");

  function changed() { key = fresh(); text.removeAttribute("aria-invalid"); }
  async function chosen() {
    if (!file.files.length) return;
    text.value = await file.files[0].text();
    changed();
    fill(said);
    text.focus();
  }
  async function submitted(event) {
    event.preventDefault();
    button.disabled = true;
    fill(said);
    const kind = text.value.trimStart().startsWith("{") ? "application/json" : "application/toml";
    try {
      const job = await post("v1/jobs", text.value, { "content-type": kind, "idempotency-key": key });
      location.hash = `#/job/${job.id}`;
    } catch (error) {
      if (!(error instanceof Problem || error instanceof TypeError)) throw error;
      text.setAttribute("aria-invalid", "true");
      fill(said, refused(error, text));
    } finally { button.disabled = false; }
  }
}

function refused(error, text) {
  if (!(error instanceof Problem)) return el("p", { class: "reason" }, "The gateway cannot be reached.");
  if (!error.errors.length) return el("p", { class: "reason" }, error.message);
  return el("ul", { class: "faults" }, error.errors.map(fault => {
    const line = lineOf(text.value, fault.path);
    const show = () => {
      const lines = text.value.split("\n"), start = lines.slice(0, line).join("\n").length + (line ? 1 : 0);
      text.focus();
      text.setSelectionRange(start, start + lines[line].length);
    };
    return el("li", {}, el("code", {}, fault.path || "spec"), " ", fault.message,
      fault.hint ? el("span", { class: "hint" }, ` ${fault.hint}`) : null,
      line === null ? null : el("button", { type: "button", onclick: show }, `Line ${line + 1}`));
  }));
}

/** The line on which the key stands: in TOML below its table's heading, in JSON the first of its name; or null. */
function lineOf(text, path) {
  const parts = path.split(".").filter(part => !/^\d+$/.test(part)), lines = text.split("\n");
  for (; parts.length; parts.pop()) {
    const name = parts[parts.length - 1], heading = parts.slice(0, -1).join(".");
    let inside = "";
    for (const [i, line] of lines.entries()) {
      const head = /^\s*\[+([^\]]+)\]/.exec(line);
      if (head) inside = head[1].trim();
      if (head && inside === parts.join(".")) return i;
      const named = /^\s*"?([\w.-]+)"?\s*[=:]/.exec(line);
      if (named && (named[1] === parts.join(".") || (named[1] === name && (inside === heading || text.trimStart().startsWith("{"))))) return i;
    }
  }
  return null;
}

/** A key of one submission: pressed twice, the button makes one job. */
function fresh() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), byte => byte.toString(16).padStart(2, "0")).join("");
}

const example = model => `name = "first"

[model]
name = "${model}"

[task]
environment = "characters"
options = { game = "kind", length = 6, alphabet = "ab12" }

[sampling]
max_tokens = 6

[schedule]
updates = 20
`;

// One token: what its row says, and its whole path with its version's own.
import { clock, el, facts, num, since, table, NONE } from "./dom.js";

/** What the trajectory's record says of the token. */
export function brief(row, t) {
  const title = el("h2", {}, row.index === null ? `Token of the ${row.kind === "prompt" ? "prompt" : "tool's answer"}` : `Token ${row.index}`,
    row.text === null ? null : el("code", { class: "quoted" }, JSON.stringify(row.text)));
  if (row.index === null) return [title, facts([["Place", `${row.position} of ${t.tokens.length}`], ["Id", String(row.id)]])];
  const span = t.spans[row.span];
  const gap = row.trainer_logprob === null ? null : row.trainer_logprob - row.behaviour_logprob;
  return [title, facts([
    ["Version", el("b", { id: "token-version" }, row.version)], ["Digest", el("code", {}, span.digest.slice(0, 12))],
    ["Worker", span.worker], ["Span", `${span.start} to ${span.end - 1}, context ${span.context}`],
    ["Log-prob, as sampled", num(row.behaviour_logprob, 5)], ["Log-prob, trainer", num(row.trainer_logprob, 5)],
    ["Gap", gap === null ? NONE : num(gap, 3)], ["Ratio", num(row.ratio, 5)], ["Lag", row.lag === null ? NONE : String(row.lag)],
    ["In the loss", row.loss_mask ? "yes" : "no"], ["Id", String(row.id)], ["Place", `${row.position} of ${t.tokens.length}`]])];
}

/** What only the token's own route says: the gap taken apart, routes, and both paths. */
export function whole(path) {
  const apart = path.decomposition;
  return el("div", {},
    apart === null ? null : facts([["Mismatch", num(apart.mismatch)], ["Staleness", num(apart.staleness)], ["Rollout again, same version", num(apart.rollout_logprob, 5)], ["Scored again by", apart.worker]]),
    path.routes === null ? null : el("details", {}, el("summary", {}, "Routes"), table("Experts by routing layer", ["Layer", "Experts"], path.routes.map((experts, i) => [String(i), experts.join(", ")]))),
    versionPath(path.version),
    el("h3", {}, "This token's path"), hops(path.hops, path.missing));
}

function versionPath(version) {
  if (version === null) return el("p", { class: "none" }, "Nothing is known of this version any more.");
  const v = version.record, start = v.minted;
  const step = (name, at) => el("li", { class: at === null ? "missing" : null }, el("b", {}, name), " ", at === null ? "not reached" : at === start ? clock(at) : since(at, start));
  return el("div", {}, el("h3", {}, `Path of version ${v.version}`),
    el("ol", { class: "hops" }, step("minted", v.minted), step("converted", v.converted), step("published", v.published), step("active", v.active),
      v.retired === null ? null : step("retired", v.retired)),
    table("On each worker, counted from minting", ["Worker", "Staged", "Verified", "Active", "Pause"], Object.entries(v.workers).map(([worker, w]) => [worker,
      since(w.staged, start), w.verdict && w.verdict !== "verified" ? `${since(w.verified, start)} ${w.verdict}` : since(w.verified, start), since(w.active, start),
      w.pause_ms === null ? NONE : `${num(w.pause_ms)} ms`])));
}

function hops(list, missing) {
  const first = list.find(hop => hop.at !== null);
  return el("ol", { class: "hops" }, list.map(hop => el("li", {}, el("b", {}, hop.hop.replace("token.", "")), " ",
    hop.at === null ? "" : `${since(hop.at, first.at)} `, hop.seconds === null ? "" : `(${num(hop.seconds * 1000)} ms) `, hop.instance || hop.service)),
  missing.map(name => el("li", { class: "missing" }, `${name.replace("token.", "")}: not reached, or no record of it`)));
}

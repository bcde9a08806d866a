// A job's curves: reward, mismatch against staleness, lag; each point may stand for many updates.
import { get } from "./api.js";
import { el } from "./dom.js";
import { Lines } from "./plots.js";

const POINTS = 300;

export function charts(path, signal) {
  const xName = "update";
  const reward = new Lines("Reward", { unit: "mean reward", xName, floor: 0, ceiling: 1 });
  const mismatch = new Lines("Mismatch and staleness", { unit: "mean |difference| of log-probs, nats, logarithmic", xName, powers: true, wide: true });
  const lag = new Lines("Lag", { unit: "versions", xName, floor: 0, ceiling: 1 });
  const about = el("p", {}, "Gap: trainer against the log-prob as sampled. Of the tokens that rollout scored again under the version being updated: " +
    "mismatch is trainer against rollout at the same weights, staleness is what is left of the gap.");

  async function load() {
    const found = await get(`${path}/curves?points=${POINTS}`, signal);
    const of = (label, style, name, high = true) => ({ label, style, points: found.items.map(p => ({
      x: p.last, from: p.first, y: p[name] ? p[name].mean : null, low: p[name] ? p[name].low : null, high: p[name] && high ? p[name].high : p[name] ? p[name].mean : null })) });
    reward.update([of("reward", "a", "reward")]);
    const base = found.baseline === null ? [] : [{ label: "baseline of mismatch", style: "e", points: found.items.map(p => ({ x: p.last, from: p.first, y: found.baseline })) }];
    mismatch.update([of("gap", "c", "gap"), of("gap at lag 0", "d", "same_version_gap"), of("mismatch", "a", "mismatch"), of("staleness", "b", "staleness"), ...base]);
    const largest = { label: "largest", style: "b", points: found.items.map(p => ({ x: p.last, from: p.first, y: p.lag ? p.lag.high : null })) };
    lag.update([of("mean", "a", "lag", false), largest]);
  }
  return { reward, mismatch, lag, about, load };
}

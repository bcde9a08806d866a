"""The command about mismatch and staleness: diagnose."""

from __future__ import annotations

from typing import Any

import typer

from syncline.scheduler.cli_jobs import AnyJob, AsJson
from syncline.scheduler.cli_session import collected, reading, say, say_json, short, show_table, the_job

_LEGEND = """\
per measured update, over the tokens of a share of its trajectories; terms are mean |difference| of log-probs, in nats
  total         trainer at this version - as sampled = mismatch + staleness, token by token
  mismatch      trainer - rollout at the same version: what precision does
  staleness     rollout at this version - as sampled: what lag does
  kv cache      the contract's KV cache against a wide one;  noise decode: two ways to score with the same weights
  exact         share of tokens with mismatch 0;  routes: share with the same experts, in the worst layer
  k3, ESS       KL of trainer and rollout;  effective sample size of the importance weights, as a share
  baseline      mean mismatch of the first `diagnostics.learn` updates, which alarms compare with"""
_COLUMNS = ("total", "mismatch", "staleness", "kv_cache", "noise_decode")


def diagnose(context: typer.Context, job: AnyJob = None, json: AsJson = False) -> None:
    """Show each measured update: mismatch and staleness, routes, KL, baseline, alarms, what was not measured."""
    with reading(context) as client:
        found = collected(client, f"/v1/jobs/{the_job(client, job)}/diagnostics")
    if json:
        say_json(found)
        return
    headings = ["update", "version", "tokens", *(name.replace("_", " ") for name in _COLUMNS), "p99 mismatch"]
    show_table([*headings, "exact", "routes", "k3", "ESS", "baseline"], [_row(record) for record in found])
    if not found:
        say("no update was measured")
        return
    say(_LEGEND)
    for record in found:
        for alarm in record["alarms"]:
            say(f"alarm     update {record['update']}: {alarm}")
    for record in found[:-1]:
        if not record["terms"]:
            reasons = dict.fromkeys(record["unmeasured"].values())
            say(f"not measured in update {record['update']}: {'; '.join(reasons)}")
    for name, why in found[-1]["unmeasured"].items():
        say(f"not measured in update {found[-1]['update']}: {name}: {why}")


def _row(r: dict[str, Any]) -> list[str]:
    terms = r["terms"]
    means = [short(terms[name]["mean"]) if name in terms else "-" for name in _COLUMNS]
    p99 = short(terms["mismatch"]["p99"]) if "mismatch" in terms else "-"
    routes = f"{min(r['routes']):.4g}" if r["routes"] else "-"
    figures = (r["kl"].get("k3"), r["effective_sample_size"], r["baseline"])
    return [
        str(r["update"]),
        r["version"],
        str(r["tokens"]),
        *means,
        p99,
        short(r["exact"]),
        routes,
        *(short(value) for value in figures),
    ]

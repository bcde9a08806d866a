"""Commands about what a job left behind: versions, trace, report."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.scheduler.cli_jobs import AnyJob, AsJson, source_words
from syncline.scheduler.cli_session import (
    collected,
    reading,
    say,
    say_json,
    settings,
    short,
    show,
    show_table,
    the_job,
)

if TYPE_CHECKING:
    from rich.tree import Tree

    from syncline.scheduler.client import Client


def versions(context: typer.Context, job: AnyJob = None, json: AsJson = False) -> None:
    """List a job's versions: their way to the workers, bytes, changed share, pause, and why one was never active."""
    with reading(context) as client:
        found = collected(client, f"/v1/jobs/{the_job(client, job)}/versions")
    if json:
        say_json(found)
        return
    show_table(list(VERSION_COLUMNS), [version_row(v) for v in found])
    for v in found:
        if v["reason"]:
            say(f"{v['version']}: {why_not(v)}")


VERSION_COLUMNS = (
    "version",
    "state",
    "convert",  # from minted to published
    "stage",  # until the slowest worker had verified it
    "commit",  # until the scope was complete; under a barrier from the last verification on
    "on",  # workers that it became active on
    "size",
    "changed",  # share of elements against the version published before
    "delta",  # bytes of what changed, as deltas where those are smaller
    "pulled",  # bytes that travelled to the worker that needed most
    "pause",  # longest of a worker
)


def version_row(v: dict[str, Any]) -> list[str]:
    """A version's record as cells under `VERSION_COLUMNS`."""
    paths = list(v["workers"].values())
    verified = max((path["verified"] for path in paths if path["verified"]), default=None)
    pulls = [path["pulled"]["full"] + path["pulled"]["deltas"] for path in paths if path["pulled"]]
    pauses = [path["pause_ms"] for path in paths if path["pause_ms"] is not None]
    share = v["changed_share"]
    return [
        v["version"],
        v["state"],
        short(_between(v["minted"], v["published"]), " s"),
        short(_between(v["published"], verified), " s"),
        short(_between(verified, v["active"]), " s"),
        str(sum(1 for path in paths if path["active"])),
        _bytes(v["nbytes"]),
        short(None if share is None else 100 * share, " %"),
        "-" if v["delta_bytes"] is None else _bytes(v["delta_bytes"]),
        _bytes(max(pulls)) if pulls else "-",
        short(max(pauses, default=None), " ms"),
    ]


def _between(start: float | None, end: float | None) -> float | None:
    """Seconds; None: one of the ends is not known, or the later came first (rolling: others stage on)."""
    return None if start is None or end is None or end < start else end - start


def why_not(version: dict[str, Any]) -> str:
    """Why a version was never active, and what workers said of it that this does not repeat."""
    told: str = version["reason"]
    refusals = dict.fromkeys(path["reason"] for path in version["workers"].values() if path["reason"])
    return "; ".join([told, *(reason for reason in refusals if reason not in told)])


def trace(
    context: typer.Context,
    trajectory: Annotated[str, typer.Argument(help="trajectory id, JOB-GROUP-INDEX", metavar="TRAJECTORY")],
    token: Annotated[int | None, typer.Option(min=0, help="sampled token, 0 is the first")] = None,
    json: AsJson = False,
) -> None:
    """Show a trajectory's path hop by hop, or one token's, with the path of the version that sampled it."""
    from syncline.contract.token_path import parse_trajectory_id

    job, _, _ = parse_trajectory_id(trajectory)
    path = f"/v1/jobs/{job}/trajectories/{trajectory}"
    with reading(context) as client:
        found = client.get(path if token is None else f"{path}/tokens/{token}")
    if json:
        say_json(found)
    else:
        show(trajectory_tree(found) if token is None else token_tree(found))


def report(context: typer.Context, job: AnyJob = None, json: AsJson = False) -> None:
    """Print a job's summary and where its report lies."""
    with reading(context) as client:
        found = the_job(client, job)
        if json:
            say_json(client.get(f"/v1/jobs/{found}/summary"))
        else:
            show_report(client, found)


def show_report(client: Client, job: str) -> None:
    """The summary as a few lines."""
    for told in report_lines(
        job, client.get(f"/v1/jobs/{job}/summary"), client.get(f"/v1/jobs/{job}")["reason"]
    ):
        say(told)
    path = settings().runs / job / "report.html"
    say(f"  report        {path if path.exists() else f'{client.url}/v1/jobs/{job}/report'}")


def report_lines(job: str, s: dict[str, Any], reason: str) -> list[str]:
    """A summary for people. `reason`: why the job failed or was cancelled, "": it tells of none."""
    lag, ledger, reward = s["lag"], s["ledger"], s["reward"]
    modes = " -> ".join(f"{m['mode']} (from update {m['update']})" for m in s["modes"])
    first, last = short(reward["first_fifth"]), short(reward["last_fifth"])
    broken, seconds = s["conservation_violations"], s["seconds"]
    return [
        f"job {job} {s['state']} after {s['updates']} updates",
        *([f"  reason        {reason}"] if reason else []),
        f"  reward        {first} in the first fifth, {last} in the last",
        f"  modes         {modes or '-'}",
        f"  lag           at most {short(lag['max'])}, mean {short(lag['mean'])}, bound {lag['bound']}",
        "  trajectories  " + ", ".join(f"{count} {state}" for state, count in ledger.items() if count),
        *prompt_lines(s["prompts"]),
        f"  lost          {s['lost']}, repeated {s['repeated']}, conservation violations {broken}",
        f"  versions      {s['versions']['minted']} minted, {s['versions']['active']} active",
        f"  log-prob gap  {short(s['mismatch'])} at lag 0",
        *gap_lines(s["diagnostics"]),
        f"  seconds       {short(seconds['setup'])} set-up, {short(seconds['training'])} training",
    ]


def prompt_lines(account: dict[str, Any]) -> list[str]:
    """What became of the groups of each data set; nothing of a single one whose groups were all trained."""
    sources = account["sources"]
    plain = len(sources) == 1 and sources[0]["trained"] == sources[0]["drawn"]
    lines = [] if plain else [f"  prompts       {words}" for words in source_words(account)]
    lost = account["lost"]
    return lines + [
        f"  given up      prompt {one['prompt']} of {one['source']}: {one['reason']}" for one in lost
    ]


def gap_lines(d: dict[str, Any]) -> list[str]:
    """What was measured of mismatch and staleness, and each alarm."""
    terms = d["terms"]
    if "mismatch" not in terms:
        return [f"  mismatch      not measured: {d['unmeasured'].get('mismatch', 'no update was measured')}"]
    mismatch, staleness = terms["mismatch"], terms["staleness"]
    learned = "not learned yet" if d["baseline"] is None else short(d["baseline"])
    return [
        f"  mismatch      mean {short(mismatch['mean'])}, p99 up to {short(mismatch['p99'])}, baseline {learned}; "
        f"staleness mean {short(staleness['mean'])} ({mismatch['tokens']} tokens of {d['updates']} updates)",
        *(f"  alarm         {alarm}" for alarm in d["alarms"]),
    ]


# ---- trees --------------------------------------------------------------------------------------------
def token_tree(t: dict[str, Any]) -> Tree:
    """One token's path: its hops, then the path of its version."""
    from rich.tree import Tree

    token, span = t["token"], t["span"]
    said = "" if token["text"] is None else f" {token['text']!r}"
    root = Tree(f"token {token['index']} of {t['trajectory']}: id {token['id']}{said}")
    root.add(
        f"span [{span['start']}, {span['end']}) sampled under version {span['version']} "
        f"(digest {span['digest'][:12]}) on {span['worker']}, context {_context(span)}"
    )
    trainer = (
        "not scored" if t["trainer_logprob"] is None else f"{t['trainer_logprob']:.6f}, gap {t['gap']:+.2e}"
    )
    root.add(f"log-prob {t['behaviour_logprob']:.6f} when sampled; by the trainer {trainer}")
    apart = t["decomposition"]
    if apart is not None:
        root.add(
            f"gap {apart['total']:+.2e} = mismatch {apart['mismatch']:+.2e} + staleness {apart['staleness']:+.2e} "
            f"(scored again by {apart['worker']})"
        )
    root.add(_outcome(t))
    _add_hops(root.add("token path"), t["hops"])
    for name in t["missing"]:
        root.add(f"{name}: not reached, or no record of it")
    if t["version"] is not None:
        record = t["version"]["record"]
        branch = root.add(
            f"path of version {record['version']}: {record['state']}, digest {record['digest'][:12]}"
        )
        _add_hops(branch, t["version"]["path"])
    return root


def trajectory_tree(t: dict[str, Any]) -> Tree:
    """A trajectory's spans and hops."""
    from rich.tree import Tree

    root = Tree(f"trajectory {t['trajectory']}: {t['state']}, attempt {t['attempt']}, prompt {t['prompt']}")
    root.add(f"text {t['text']!r} ({len(t['logprobs'])} sampled tokens, finish: {t['finish']})")
    root.add(_outcome(t))
    spans = root.add("spans")
    for span in t["spans"]:
        spans.add(
            f"[{span['start']}, {span['end']}) version {span['version']} (digest {span['digest'][:12]}) "
            f"on {span['worker']}, context {_context(span)}"
        )
    _add_hops(root.add("path"), t["hops"])
    return root


def _context(span: dict[str, Any]) -> str:
    return (
        f"{span['context']}, {span['carried_age']} versions old"
        if span["carried_age"]
        else str(span["context"])
    )


def _outcome(t: dict[str, Any]) -> str:
    reward = t["reward"]
    scored = "no reward yet" if reward is None else f"reward {short(reward['value'])} ({reward['state']})"
    used = "not trained" if t["update"] is None else f"update {t['update']}, lag {t['lag']}"
    advantage = "" if t["advantage"] is None else f", advantage {t['advantage']:+.3f}"
    return f"{t['state']}: {scored}{advantage}; {used}"


def _add_hops(branch: Tree, hops: list[dict[str, Any]]) -> None:
    """Each hop with when it began (seconds after the first), how long it took, who did it, and what it set."""
    start = next((hop["at"] for hop in hops if hop["at"] is not None), None)
    for hop in hops:
        at = "        " if hop["at"] is None or start is None else f"{hop['at'] - start:+8.3f}"
        took = "" if hop["seconds"] is None else f"{1000 * hop['seconds']:.1f} ms"
        service, instance = hop["service"], hop["instance"]
        who = service if instance in ("", service) else f"{service}/{instance}"
        told = [f"{name}={_fact(value)}" for name, value in hop["attributes"].items() if name not in _KNOWN]
        facts = " ".join(told)
        branch.add(f"{at} s  {hop['hop']:<18} {took:>10}  {who:<14} {facts}")


_KNOWN = frozenset({"job", "trajectory"})  # in the heading already


def _fact(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text[:12] if len(text) == 64 else text  # digests are told by their first 12 digits


def _clock(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).astimezone().strftime("%H:%M:%S")


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"

"""Commands about jobs: submit, list, status, watch, cancel, pause, resume, switch, scale."""

from __future__ import annotations

import secrets
import stat
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.scheduler.cli_session import (
    FAILURE,
    collected,
    reaching,
    reading,
    say,
    say_json,
    short,
    show_table,
    the_job,
)

if TYPE_CHECKING:
    from syncline.contract.job import JobSpec
    from syncline.scheduler.client import Client


class Mode(StrEnum):
    """The modes that a job may be switched to."""

    COLOCATED = "colocated"
    DISJOINT = "disjoint"


Job = Annotated[str, typer.Argument(help="job id, or `latest`", metavar="JOB")]
AnyJob = Annotated[str | None, typer.Argument(help="job id; default: the latest job", metavar="JOB")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else")]
SpecFile = Annotated[Path, typer.Argument(help="job spec, .toml or .json", metavar="SPEC")]


_KINDS = {
    stat.S_IFDIR: "is a directory",
    stat.S_IFIFO: "is a pipe",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}


def read_spec(path: Path) -> JobSpec:
    """The spec in a file. Raises `SpecError`, or `ValueError` for a file that cannot be read."""
    from syncline.contract.spec_text import parse_json, parse_toml

    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind):  # reading a named pipe would wait for its writer
            raise ValueError(
                f"spec {path}: {_KINDS.get(stat.S_IFMT(kind), 'is no file')}; a spec is a regular file"
            )
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"spec {path}: {error.strerror or error}") from None
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"spec {path}: the name must end with .toml or .json")
    return parse_toml(content) if path.suffix == ".toml" else parse_json(content)


def post_spec(client: Client, spec: JobSpec) -> str:
    """Submit; returns the job's id. The key makes one job of it, however often the request arrives."""
    key = {"idempotency-key": secrets.token_hex(16)}
    return str(client.post("/v1/jobs", spec.canonical().encode(), key)["id"])


def submit(context: typer.Context, spec: SpecFile, json: AsJson = False) -> None:
    """Submit a job and return at once."""
    resolved = read_spec(spec)
    with reaching(context) as client:
        job = post_spec(client, resolved)
        if json:
            say_json(client.get(f"/v1/jobs/{job}"))
        else:
            say(job)


def list_jobs(context: typer.Context, json: AsJson = False) -> None:
    """List jobs, newest first."""
    with reading(context) as client:
        jobs = collected(client, "/v1/jobs")
    if json:
        say_json(jobs)
        return
    rows = [
        [
            j["id"],
            j["name"],
            j["state"],
            j["mode"] or "-",
            f"{j['update']}/{j['updates']}",
            short(j["reward"]),
            held_out(j["evaluated"]),
        ]
        for j in jobs
    ]
    show_table(["job", "name", "state", "mode", "updates", "reward", "held out"], rows)


def held_out(found: dict[str, Any] | None) -> str:
    """An evaluation in a few words: version and, of its smallest k, pass@k with the interval."""
    if found is None:
        return "-"
    k = min(found["pass_at"], key=int)
    rate = found["pass_at"][k]
    told = "-" if rate is None else f"{rate[0]:.3f} [{rate[1]:.3f}, {rate[2]:.3f}]"
    return f"{found['epoch']}.{found['version']}: pass@{k} {told}"


def status(context: typer.Context, job: AnyJob = None, json: AsJson = False) -> None:
    """Show one job: state, phase, workers, ledger, and what waits for what."""
    with reading(context) as client:
        found = the_job(client, job)
        path = f"/v1/jobs/{found}"
        view: dict[str, Any] = client.get(path)
        if json:
            say_json(view)
            return
        workers, ledger = client.get(f"{path}/workers")["items"], client.get(f"{path}/ledger")
        trackers = client.get(f"{path}/tracking")["items"]
        prompts = client.get(f"{path}/prompts")
    phase = f"{view['mode'] or '-'} / {view['phase'] or '-'}"
    why = f": {view['reason']}" if view["reason"] else ""
    say(f"{view['id']}  {view['name']}  {view['state']}{why}")
    say(f"updates   {view['update']} of {view['updates']}, reward {short(view['reward'])}")
    if view["evaluated"] is not None:
        say(f"held out  {held_out(view['evaluated'])}")
    say(f"phase     {phase}")
    if view["pool"] is not None:
        say(f"pool      {pool_words(view['pool'])}")
    say("ledger    " + ", ".join(f"{ledger[key]} {key}" for key in _LEDGER if ledger[key]))
    for words in source_words(prompts):
        say(f"prompts   {words}")
    if view["alarm"]:
        say(f"alarm     {view['alarm']}")
    for tracker in trackers:
        failed = f": {tracker['reason']}" if tracker["reason"] else ""
        say(f"tracking  {tracker['tracker']} {tracker['state']}, update {tracker['update']}{failed}")
    for wait in view["waits"]:
        say(f"waits     {wait['owner']} for {wait['name']}: {wait['detail']}")
    for w in workers:
        figures = f"{w['running']} running, {short(w['tokens_per_second'], ' tokens/s')}"
        say(f"worker    {w['worker']} {w['state']}, version {w['version'] or '-'}, {figures}")


def pool_words(pool: dict[str, Any]) -> str:
    """The rollout workers of a job, in words."""
    words = f"{pool['workers']} workers"
    if pool["least"] < pool["most"]:
        words += f" ({pool['least']} to {pool['most']})"
    for what in ("coming", "leaving"):
        if pool[what]:
            words += f", {what}: {' '.join(pool[what])}"
    return words


def source_words(account: dict[str, Any]) -> list[str]:
    """What became of the prompts of each data set, in words."""
    import msgspec

    from syncline.contract.drawn import PromptAccount, in_words

    return [f"{one.name}: {in_words(one)}" for one in msgspec.convert(account, PromptAccount).sources]


_LEDGER = ("submitted", "running", "buffered", "trained", "filtered", "failed", "expired")


def watch(context: typer.Context, job: AnyJob = None) -> None:
    """Follow a job until it ends. Ctrl-C leaves it running."""
    from syncline.scheduler.watch import follow

    with reaching(context) as client:
        ended = follow(client, the_job(client, job))
    if ended["state"] != "succeeded":
        raise typer.Exit(FAILURE)


def _ask(context: typer.Context, job: str, verb: str, body: Any = None) -> None:
    with reaching(context) as client:
        found = the_job(client, job)
        answer = client.post(f"/v1/jobs/{found}/{verb}", body)
    say(f"{found}: {verb} asked for; the job is {answer['state']}")


def cancel(context: typer.Context, job: Job) -> None:
    """Ask a job to end now; its open trajectories end as expired."""
    _ask(context, job, "cancel")


def pause(context: typer.Context, job: Job) -> None:
    """Ask a job to stop after what is in flight."""
    _ask(context, job, "pause")


def resume(context: typer.Context, job: Job) -> None:
    """Ask a paused job to go on."""
    _ask(context, job, "resume")


def switch(
    context: typer.Context,
    job: Job,
    mode: Annotated[Mode, typer.Argument(help="colocated or disjoint", metavar="MODE")],
) -> None:
    """Ask a job to change its mode while it runs: colocated or disjoint."""
    _ask(context, job, "mode", {"mode": mode.value})


def scale(
    context: typer.Context,
    job: Job,
    workers: Annotated[int, typer.Argument(help="rollout workers, within the spec's bounds", min=1)],
) -> None:
    """Ask a disjoint job for more or fewer rollout workers while it runs."""
    _ask(context, job, "workers", {"workers": workers})

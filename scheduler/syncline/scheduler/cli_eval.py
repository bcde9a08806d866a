"""The command about evaluations: eval."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from syncline.scheduler.cli_jobs import AsJson, Job
from syncline.scheduler.cli_session import (
    FAILURE,
    LATEST,
    collected,
    note,
    reaching,
    reading,
    say,
    say_json,
    short,
    show_table,
    the_job,
)

Version = Annotated[
    str | None,
    typer.Option(
        "--version", help="EPOCH.NUMBER, NUMBER, or `latest`; default: list the evaluations that there are"
    ),
]


def eval_(
    context: typer.Context,
    job: Job,
    version: Version = None,
    prompts: Annotated[int, typer.Option(help="held-out prompts")] = 64,
    samples: Annotated[int, typer.Option(help="samples of each prompt")] = 4,
    k: Annotated[str, typer.Option(help="pass@k for each of these, such as 1,4")] = "1",
    correct: Annotated[float, typer.Option(help="reward from which a sample is correct")] = 1.0,
    first: Annotated[int | None, typer.Option(help="first prompt, of data that training leaves out")] = None,
    seed: Annotated[int | None, typer.Option(help="another data seed than the training job's")] = None,
    option: Annotated[list[str], typer.Option(help="KEY=VALUE of the task: other, held-out data")] = [],  # noqa: B006
    json: AsJson = False,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="wait for the result")] = True,
) -> None:
    """Evaluate a version of a job on held-out prompts, or list its evaluations."""
    if version is None:
        with reading(context) as client:
            _show(_listed(client, _trained(client, job)), json)
        return
    asked: dict[str, Any] = {"version": version, "prompts": prompts, "samples": samples, "correct": correct}
    asked |= {"k": _numbers(k), "options": dict(map(_option, option))}
    asked |= {key: value for key, value in (("seed", seed), ("first", first)) if value is not None}
    with reaching(context) as client:
        made = client.post(f"/v1/jobs/{_trained(client, job)}/evaluations", asked)
        note(f"{made['id']} evaluates version {made['version']} of {made['of']}")
        if not follow:
            say_json(made) if json else say(made["id"])
            return
        ended = _until_ended(client, made["id"])
        _show(_listed(client, made["id"]), json)
    if ended["state"] != "succeeded":
        note(f"{made['id']} {ended['state']}: {ended['reason']}")
        raise typer.Exit(FAILURE)


eval_.__name__ = "eval"


def _trained(client: Any, job: str) -> str:
    """`job`; of "latest", the newest that is no evaluation."""
    if job != LATEST:
        return the_job(client, job)
    found = [one for one in collected(client, "/v1/jobs") if one["kind"] == "train"]
    return str(found[0]["id"]) if found else the_job(client, job)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--k {text!r} is no list of whole numbers, such as 1,4") from None


def _option(text: str) -> tuple[str, Any]:
    """KEY and VALUE; a value that reads as JSON is that, any other is text."""
    import msgspec

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"--option {text!r} is not of the form KEY=VALUE")
    try:
        return key, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return key, value


def _until_ended(client: Any, job: str) -> dict[str, Any]:
    """Wait for the evaluation; says what it waits for whenever that changes."""
    import time

    told = ""
    while True:
        view: dict[str, Any] = client.get(f"/v1/jobs/{job}")
        if view["ended"] is not None:
            return view
        why = view["reason"] or view["state"]
        if why != told:
            note(f"{job}: {why}")
            told = why
        time.sleep(0.3)


def _listed(client: Any, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(f"/v1/jobs/{job}/evaluations")["items"]
    return found


def _show(found: list[dict[str, Any]], json: bool) -> None:
    if json:
        say_json(found)
        return
    ks = sorted({k for one in found for k in one["pass_at"]}, key=int)
    headings = ["version", "prompts", "samples", "counted", "unscored", "lost", "foreign", "reward"]
    show_table([*headings, *(f"pass@{k}" for k in ks), "by"], [_row(one, ks) for one in found])
    if not found:
        say("no version was evaluated")


def _row(one: dict[str, Any], ks: list[str]) -> list[str]:
    counts = [str(one[name]) for name in ("prompts", "samples", "counted", "unscored", "lost", "foreign")]
    rates = [_rate(one["pass_at"].get(k)) for k in ks]
    return [f"{one['epoch']}.{one['version']}", *counts, short(one["mean_reward"]), *rates, one["job"]]


def _rate(value: list[float] | None) -> str:
    return "-" if value is None else f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]"

"""The command `export`: has the gateway write an export, and fetches it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.scheduler.cli_jobs import AnyJob, AsJson
from syncline.scheduler.cli_session import Failure, reading, say, say_json, the_job

if TYPE_CHECKING:
    from syncline.scheduler.client import Client

LOOK_EVERY = 0.2  # seconds between two looks at an export that is being made


class Layout(StrEnum):
    """For whom an export is."""

    HF = "hf"
    LORA = "lora"
    SGLANG = "sglang"


class From(StrEnum):
    """What is exported."""

    VERSION = "version"
    CHECKPOINT = "checkpoint"


def export(
    context: typer.Context,
    job: AnyJob = None,
    version: Annotated[
        str | None, typer.Option(help="EPOCH.NUMBER, or NUMBER; default: the newest that there is")
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option("--format", help="a model for transformers, a PEFT adapter, or as rollout holds it"),
    ] = Layout.HF,
    origin: Annotated[
        From | None,
        typer.Option("--from", help="default: the version, or a checkpoint that gives the same bytes"),
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="new folder, or an fsspec address; default: JOB-VERSION-FORMAT here")
    ] = None,
    shard_gb: Annotated[float, typer.Option(min=1e-6, help="most GiB in one safetensors file")] = 4.0,
    json: AsJson = False,
) -> None:
    """Export a version as a checkpoint that transformers or SGLang load, with a model card."""
    from syncline.scheduler.fetching import Target, target_of

    if output is not None:
        target_of(output).refuse_taken()
    asked: dict[str, Any] = {"format": layout.value, "shard_bytes": int(shard_gb * 2**30), "version": version}
    asked["from"] = None if origin is None else origin.value
    with reading(context) as client:
        path = f"/v1/jobs/{the_job(client, job)}/exports"
        with _bar("writing") as shown:
            made = _made(client, path, client.post(path, asked), shown)
        record = made["record"]
        target: Target = target_of(output or f"{record['job']}-{made['name']}")
        target.refuse_taken()
        with _bar("fetching") as shown:
            target.fetch(client, f"{path}/{made['name']}", record, shown)
        client.delete(f"{path}/{made['name']}")
    if json:
        say_json({"output": target.address, **record})
        return
    say(f"version {record['version']} of {record['job']} as {record['format']}: {target.address}")
    say(f"  values        {record['values']}")
    size = sum(file["nbytes"] for file in record["files"])
    say(f"  files         {len(record['files'])}, {size / 1e6:.1f} MB; README.md is the model card")


def _made(client: Client, path: str, view: dict[str, Any], shown: Any) -> dict[str, Any]:
    """The export once it is there. Raises `Failure` with the reason if it will not be."""
    while view["state"] == "running":
        progress = view["progress"]
        shown(progress["done"], progress["total"])
        time.sleep(LOOK_EVERY)
        view = client.get(f"{path}/{view['name']}")
    if view["state"] != "ready":
        raise Failure(f"export {view['name']} {view['state']}: {view['reason']}")
    return view


@contextmanager
def _bar(what: str) -> Iterator[Any]:
    """A progress bar on stderr; what it gives takes bytes done and bytes in all (0: not known)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def shown(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total or None)

        yield shown

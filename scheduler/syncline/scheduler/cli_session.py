"""How a command reaches a gateway, prints, and fails. Nothing here knows a particular command."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from syncline.runtime.settings import Settings
    from syncline.scheduler.client import Client

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130
READY_SECONDS = 60.0
LEFT_SECONDS = 2.0  # for the gateway that a killed supervisor may have left
LATEST = "latest"
WIDE = 240  # columns when nobody's terminal says otherwise


class NothingUp(Exception):
    """A command needs a running installation, and none runs in this run root."""


class Failure(Exception):
    """The command did what it could and the outcome is a failure; the message is all there is to say."""


def settings() -> Settings:
    from syncline.runtime.settings import Settings

    return Settings.read(os.environ)


def given_url(context: typer.Context) -> str | None:
    """The `--url` of the command line, None: the installation of this run root."""
    url = context.obj
    assert url is None or isinstance(url, str)
    return url


def _local_url(here: Settings, runs_jobs: bool = False) -> str | None:
    """Where the gateway of this run root is, None: nothing is up, or with `runs_jobs` nothing that runs jobs."""
    from syncline.scheduler.stack import running

    up = running(here.runs)
    return None if up is None or (runs_jobs and up.reads_only) else up.url


@contextmanager
def reaching(context: typer.Context) -> Iterator[Client]:
    """A client of the gateway at `--url`, or of the running installation. Raises `NothingUp`."""
    from syncline.scheduler.client import Client

    here = settings()
    url = given_url(context)
    if url is None:
        url = _local_url(here)
        if url is None:
            raise NothingUp(f"nothing is up in {here.runs}; start it with `syncline up`, or name --url")
        client = Client(url, here.token, lambda: _local_url(here, runs_jobs=True), here.tls_cert)
    else:
        client = Client(url, here.token, trusted=here.tls_cert)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def reading(context: typer.Context) -> Iterator[Client]:
    """`reaching`, and if nothing is up, a gateway with its Redis for as long as the command reads.

    No scheduler is started, so looking at an old run never wakes one of its jobs; and what a killed supervisor
    left running is read where it is, so looking never ends a job either.
    """
    from syncline.scheduler.client import Client
    from syncline.scheduler.stack import read_up, running

    here = settings()
    if given_url(context) is not None or running(here.runs) is not None:
        with reaching(context) as client:
            yield client
        return
    if not here.runs.is_dir():
        raise NothingUp(f"there is no run folder {here.runs}")
    left = read_up(here.runs)
    if left is not None:
        client = Client(left.url, here.token, trusted=here.tls_cert)
        try:
            if not client.await_ready(LEFT_SECONDS):
                note("the supervisor is gone and its services still run; `syncline up` takes them over")
                yield client
                return
        finally:
            client.close()
    note(f"nothing is up: reading {here.runs} through a gateway of my own")
    with _own_gateway(here) as client:
        yield client


@contextmanager
def _own_gateway(here: Settings) -> Iterator[Client]:
    """A gateway and its Redis for as long as they are needed. Raises `CannotStart`, `Failure`."""
    from syncline.scheduler.client import Client
    from syncline.scheduler.stack import CannotStart
    from syncline.scheduler.supervisor import Supervisor

    logging.getLogger("syncline").setLevel(logging.ERROR)  # a Redis that starts is no news here
    supervisor = Supervisor(os.environ, services=("gateway",))
    refused: list[CannotStart] = []

    def supervise() -> None:
        try:
            supervisor.run()
        except CannotStart as error:
            refused.append(error)

    thread = threading.Thread(target=supervise, name="supervisor")
    thread.start()
    client = Client(supervisor.url, here.token, trusted=here.tls_cert)
    try:
        end, said = time.monotonic() + READY_SECONDS, "starting"
        while said and thread.is_alive() and time.monotonic() < end:
            said = client.await_ready(1.0)
        if refused:
            raise refused[0]
        if said:
            raise Failure(f"the gateway did not get ready: {said}; see {here.runs}/logs/gateway.log")
        yield client
    finally:
        client.close()
        supervisor.stop()
        thread.join()


def the_job(client: Client, job: str | None) -> str:
    """`job`, or the newest one for None and "latest". Raises `Failure` when there is none."""
    if job is not None and job != LATEST:
        return job
    found = client.get("/v1/jobs", limit=1)["items"]
    if not found:
        raise Failure("there is no job yet; submit one with `syncline submit SPEC`")
    return str(found[0]["id"])


def collected(client: Client, path: str, limit: int = 500, after: str | None = None) -> list[dict[str, Any]]:
    """Items of a paged listing, in its order: all, or those after the place `after`."""
    items: list[dict[str, Any]] = []
    while True:
        page = client.get(path, limit=limit, **({} if after is None else {"after": after}))
        items += page["items"]
        after = page["next"]
        if after is None:
            return items


# ---- printing --------------------------------------------------------------------------------------------
def show(renderable: RenderableType) -> None:
    """A rich table or tree, as wide as the terminal, or as it needs to be where there is none."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False, markup=False).print(renderable)
        return
    console = Console(highlight=False, markup=False, width=WIDE)
    with console.capture() as captured:
        console.print(renderable)
    for line in captured.get().splitlines():
        say(line.rstrip())


def say(text: str = "") -> None:
    """A line of the command's answer."""
    typer.echo(text)


def note(text: str) -> None:
    """A line beside the answer, on stderr: stdout stays what was asked for."""
    typer.echo(text, err=True)


def say_json(value: Any) -> None:
    """The answer as JSON, and nothing else on stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """Rows under headings, as wide as they need to be."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    show(table)


def short(value: float | None, unit: str = "") -> str:
    """A number for people; a dash for None."""
    return "-" if value is None else f"{value:.3g}{unit}" if abs(value) < 1000 else f"{value:,.0f}{unit}"

"""Commands about the installation on this machine: run, up, down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from syncline.scheduler.cli_jobs import SpecFile, post_spec, read_spec
from syncline.scheduler.cli_session import (
    BAD_INPUT,
    FAILURE,
    READY_SECONDS,
    Failure,
    NothingUp,
    collected,
    given_url,
    note,
    reaching,
    say,
    settings,
)

if TYPE_CHECKING:
    from syncline.runtime.settings import Settings
    from syncline.scheduler.client import Client
    from syncline.scheduler.stack import Up

DOWN_SECONDS = 60.0
REPORT_SECONDS = 20.0
KNOWN_SECONDS = 15.0  # for a supervisor that was just started to write `up.json`


def run(context: typer.Context, spec: SpecFile) -> None:
    """Run a job to its end: start what is not up, submit, show progress, report; exit 0 only on success."""
    from syncline.scheduler.stack import running

    resolved = read_spec(spec)
    began = time.monotonic()
    started = None  # what this command started
    if given_url(context) is None:
        started = running(settings().runs) if start(None) else None
        note(f"services ready after {time.monotonic() - began:.1f} s; web page at {_url()}")
    job = None
    try:
        with reaching(context) as client:
            job = post_spec(client, resolved)
            state = _run_job(client, job)
    finally:
        if started is not None and _still_up(started):
            _stop_unless_needed(context, job)
    if state != "succeeded":
        raise typer.Exit(FAILURE)


def _run_job(client: Client, job: str) -> str:
    from syncline.scheduler.cli_paths import show_report
    from syncline.scheduler.watch import follow

    note(f"job {job} submitted; Ctrl-C cancels it")
    ended = follow(client, job, cancel=True)
    _await_report(client, job)
    say()
    show_report(client, job)
    return str(ended["state"])


def _still_up(started: Up) -> bool:
    """Whether what runs now is what was started then: after a `down`, an `up` is somebody else's to stop."""
    from syncline.scheduler.stack import running

    now = running(settings().runs)
    return now is None or now.supervisor == started.supervisor


def _stop_unless_needed(context: typer.Context, job: str | None) -> None:
    """Stop what this command started, unless somebody else's job still runs on it."""
    from syncline.contract.events import TERMINAL_JOB_STATES
    from syncline.scheduler.client import Refused, Unreachable

    try:
        with reaching(context) as client:
            listed = collected(client, "/v1/jobs")
    except (NothingUp, Refused, Unreachable):
        listed = []
    ended = (*TERMINAL_JOB_STATES, "unrecorded")
    others = [other["id"] for other in listed if other["id"] != job and other["state"] not in ended]
    if others:
        note(f"left up for job {', '.join(others)}; `syncline down` stops it")
    else:
        stop()


def _await_report(client: Client, job: str) -> None:
    """The gateway writes the report a moment after the job has ended."""
    from syncline.scheduler.stack import running

    up = running(settings().runs)
    summary = settings().runs / job / "summary.json"
    end = time.monotonic() + REPORT_SECONDS
    while up is not None and up.url == client.url and not summary.exists() and time.monotonic() < end:
        time.sleep(0.1)


def up(
    port: Annotated[int | None, typer.Option(help="port of the gateway; default: a free one")] = None,
    foreground: Annotated[bool, typer.Option(help="stay, and stop everything on SIGTERM or Ctrl-C")] = False,
) -> None:
    """Start Redis, gateway, scheduler and errands, and keep them running in the background."""
    if foreground:
        _supervise(port)
        return
    if start(port):
        say(f"up at {_url()}")
    else:
        say(f"up already at {_url()}")


def down() -> None:
    """Stop everything in this run root, the processes of jobs included; jobs go on after the next `up`."""
    say("down" if stop() else "nothing was up")


# ---- starting ----------------------------------------------------------------------------------------------
def start(port: int | None) -> bool:
    """Start the installation and wait until it is ready. False: it was up. Raises `Failure`, `ValueError`."""
    from syncline.scheduler.stack import running

    here = settings()
    end = time.monotonic() + KNOWN_SECONDS
    while (up := running(here.runs)) is not None and up.reads_only and time.monotonic() < end:
        time.sleep(0.05)  # a command that reads the run folder has a gateway of its own; it leaves with it
    child = None
    if running(here.runs) is None:
        child = _spawn(here, port)
    up = _await_known(here, child)
    _await_ready(here, up, child)
    return child is not None and up.supervisor == child.pid


def _spawn(here: Settings, port: int | None) -> subprocess.Popen[bytes]:
    """A supervisor of its own session, so that neither a closed terminal nor a Ctrl-C reaches it."""
    script = Path(sys.executable).with_name("syncline")
    me = [str(script)] if script.exists() else [sys.executable, "-m", "syncline.scheduler.cli"]
    command = [*me, "up", "--foreground", *(() if port is None else ("--port", str(port)))]
    log = _log(here)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def _await_known(here: Settings, child: subprocess.Popen[bytes] | None) -> Up:
    """`up.json` of the supervisor that runs: the child, or one that was faster."""
    from syncline.scheduler.stack import running

    end = time.monotonic() + KNOWN_SECONDS
    while True:
        up = running(here.runs)
        if up is not None:
            return up
        if child is not None and child.poll() is not None and child.returncode != FAILURE:
            _explain(here, child)
        if time.monotonic() > end:
            _explain(here, child)
        time.sleep(0.05)


def _await_ready(here: Settings, up: Up, child: subprocess.Popen[bytes] | None) -> None:
    from syncline.scheduler.client import Client
    from syncline.scheduler.stack import alive

    client = Client(up.url, here.token, trusted=here.tls_cert)
    end = time.monotonic() + READY_SECONDS
    said = "starting"
    while said and time.monotonic() < end:
        said = client.await_ready(1.0)
        if said and not alive(up):
            _explain(here, child)
    client.close()
    if said:
        raise Failure(f"not ready after {READY_SECONDS:.0f} s: {said}; see {here.runs}/logs")


def _explain(here: Settings, child: subprocess.Popen[bytes] | None) -> None:
    """Raise with the last words of the supervisor."""
    lines = _log(here).read_text(errors="replace").splitlines() if _log(here).exists() else []
    last = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    if child is not None and child.poll() == BAD_INPUT:
        raise ValueError(last)
    raise Failure(f"the supervisor ended: {last} (see {_log(here)})")


def _log(here: Settings) -> Path:
    return here.runs / "logs" / "supervisor.log"


def _url() -> str:
    from syncline.scheduler.stack import read_up

    up = read_up(settings().runs)
    return up.url if up is not None else "?"


def _supervise(port: int | None) -> None:
    from syncline.scheduler.supervisor import Supervisor

    environ = dict(os.environ)
    if port is not None:
        environ["SYNCLINE_PORT"] = str(port)
    supervisor = Supervisor(environ)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    supervisor.run()


# ---- stopping ----------------------------------------------------------------------------------------------
def stop() -> bool:
    """Stop the installation, or what a dead supervisor left of it. False: there was nothing. Idempotent."""
    import psutil

    from syncline.scheduler.stack import alive, running
    from syncline.scheduler.supervisor import stop_leftovers

    here = settings()
    up = running(here.runs)
    if up is None:
        return stop_leftovers(here.runs)
    supervisor = psutil.Process(up.supervisor)
    supervisor.terminate()
    end = time.monotonic() + DOWN_SECONDS
    while alive(up) and time.monotonic() < end:  # not `wait`: a `run` that started it has yet to collect it
        time.sleep(0.05)
    if alive(up):
        supervisor.kill()
        while alive(up):
            time.sleep(0.05)
        stop_leftovers(here.runs)
    return True

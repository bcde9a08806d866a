"""The command `study`: the lab compares trainer variants. It runs in a process of its own, for it needs torch."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from syncline.scheduler.cli_session import INTERRUPTED, settings

Format = Annotated[str, typer.Argument(help="unified-fp8, int4, mxfp8, mxfp4 or nvfp4", metavar="FORMAT")]


def study(
    format: Format,
    updates: Annotated[int, typer.Option(min=1, help="updates per cell")] = 120,
    seeds: Annotated[str, typer.Option(help="each variant runs with each of them")] = "0,1",
    variants: Annotated[str | None, typer.Option(help="some of them only, by comma")] = None,
    groups: Annotated[int, typer.Option(min=1, help="prompts per update, 16 samples each")] = 32,
    out: Annotated[Path | None, typer.Option(help="folder of results; default: RUNS/study-FORMAT")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="cells at once, each on one core")] = 2,
    fresh: Annotated[bool, typer.Option("--fresh", help="run finished cells again")] = False,
    json: Annotated[bool, typer.Option("--json", help="findings as JSON")] = False,
) -> None:
    """Four trainer variants under one low-bit rollout: agreement, distance to BF16, reward. Ctrl-C loses no cell."""
    folder = out or settings().runs / f"study-{format}"
    command = [sys.executable, "-m", "syncline.lab.study", format, "--out", str(folder)]
    command += ["--updates", str(updates), "--seeds", seeds, "--jobs", str(jobs), "--groups", str(groups)]
    command += ["--variants", variants] if variants is not None else []
    command += [flag for flag, given in (("--fresh", fresh), ("--json", json)) if given]
    # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen(command)
    try:
        code = child.wait()
    except KeyboardInterrupt:  # the terminal has told the child too: it stops its cells and says so
        child.wait()
        code = INTERRUPTED
    if code:
        raise typer.Exit(code)

"""The command `validate`: climb the validation ladder. It runs in a process of its own, for it needs torch."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from syncline.scheduler.cli_jobs import read_spec
from syncline.scheduler.cli_session import INTERRUPTED, settings
from syncline.scheduler.cli_validation import of_job

REFERENCE = "reference"
_JOB = re.compile(r"j[0-9a-f]{10}")
MODELS = {"glm52": "tiny-glm", "lora_frozen_mxfp4": "tiny-kimi", "qwen38": "tiny-hybrid"}
"""Recipe -> the example model that has its tensors; the others are for the tiny MoE."""

Target = Annotated[
    str, typer.Argument(help="a recipe, a job spec (.toml, .json), or a job id", metavar="RECIPE|SPEC|JOB")
]


def validate(
    context: typer.Context,
    target: Target,
    model: Annotated[str | None, typer.Option(help="for a recipe: a folder under the model root")] = None,
    levels: Annotated[
        str | None,
        typer.Option(
            help="which, as 1-5 or 1,2,6; default: 1-7, or a job's own; 8 is a short run, 9 a profile"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="default: RUNS/validate-TARGET")] = None,
    json: Annotated[bool, typer.Option("--json", help="the report as JSON")] = False,
    engine: Annotated[
        str, typer.Option(help="of rollout: reference, or sglang, which starts servers of its own")
    ] = REFERENCE,
) -> None:
    """Find the boundary at which trainer and rollout part: levels in order, up to the first that fails."""
    if _JOB.fullmatch(target):
        _refuse_for_a_job(model=model, out=out, engine=engine)
        of_job(context, target, levels, json)
        return
    here = settings()
    spec = _spec(target, model)
    folder = out or here.runs / f"validate-{re.sub(r'[^A-Za-z0-9_.-]', '-', Path(target).stem)}"
    command = [sys.executable, "-m", "syncline.lab.validate", "--models", str(here.models)]
    command += ["--out", str(folder), "--levels", levels or "1-7", *(["--json"] if json else [])]
    command += ["--engine", engine]
    # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        child.communicate(spec.encode())
        code = child.returncode
    except KeyboardInterrupt:  # the terminal has told the child too
        child.wait()
        code = INTERRUPTED
    if code:
        raise typer.Exit(code)


def _refuse_for_a_job(*, model: str | None, out: Path | None, engine: str) -> None:
    """A job says itself what it is of, and its figures lie in its folder."""
    for name, given in (
        ("--model", model is not None),
        ("--out", out is not None),
        ("--engine", engine != REFERENCE),
    ):
        if given:
            raise typer.BadParameter("is for a recipe or a spec; a job says it itself", param_hint=name)


def _spec(target: str, model: str | None) -> str:
    """The job spec, as JSON, that holds what is to be validated."""
    from syncline.contract.job import JobSpec
    from syncline.contract.recipes import RECIPES

    if target in RECIPES:
        recipe = {
            "name": "validate",
            "model": {"name": model or MODELS.get(target, "tiny-moe")},
            "precision": {"recipe": target},
            "schedule": {"mode": "colocated", "in_flight": "drain", "max_lag": 0},
        }
        return JobSpec.model_validate(recipe).canonical()
    if model is not None:
        raise typer.BadParameter("is for a recipe; a spec and a job name their model", param_hint="--model")
    if not Path(target).exists():
        known = ", ".join(sorted(RECIPES))
        message = f"{target!r} is no recipe, file or job; recipes: {known}"
        raise typer.BadParameter(message, param_hint="RECIPE|SPEC|JOB")
    return read_spec(Path(target)).canonical()

"""The command `syncline`. Each command imports what it needs when it runs; none imports torch.

Exit codes: 0 done, 1 it failed, 2 the input was wrong, 130 interrupted. Errors are a line or two, never a
traceback.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from syncline.scheduler import (
    cli_diagnose,
    cli_eval,
    cli_export,
    cli_jobs,
    cli_paths,
    cli_precision,
    cli_stack,
    cli_study,
    cli_tokens,
    cli_validate,
)
from syncline.scheduler.cli_session import BAD_INPUT, FAILURE, INTERRUPTED, Failure, NothingUp, note

app = typer.Typer(
    name="syncline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement learning of language models, with the version path of every token kept true.",
)


@app.callback()
def _options(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="gateway to speak to; default: what runs in ./runs")] = None,
) -> None:
    context.obj = url


for command in (
    cli_stack.run,
    cli_stack.up,
    cli_stack.down,
    cli_jobs.submit,
    cli_jobs.list_jobs,
    cli_jobs.status,
    cli_jobs.watch,
    cli_jobs.cancel,
    cli_jobs.pause,
    cli_jobs.resume,
    cli_jobs.switch,
    cli_jobs.scale,
    cli_paths.versions,
    cli_paths.trace,
    cli_paths.report,
    cli_diagnose.diagnose,
    cli_eval.eval_,
    cli_export.export,
    cli_precision.precision,
    cli_study.study,
    cli_validate.validate,
):
    app.command(name=command.__name__.removesuffix("_jobs"))(command)
app.add_typer(cli_tokens.token)


def main() -> None:
    """Entry point of the console script."""
    from syncline.contract.spec_text import SpecError, told
    from syncline.scheduler.client import Refused, Unreachable
    from syncline.scheduler.launch.local import LauncherBusy

    try:
        app()
    except SpecError as error:
        for problem in error.problems:
            note(f"spec: {told(problem)}")
        sys.exit(BAD_INPUT)
    except Refused as error:
        _tell(error)
        sys.exit(BAD_INPUT if error.bad_input else FAILURE)
    except ValueError as error:  # of settings and identifiers: they name the key
        note(f"error: {error}")
        sys.exit(BAD_INPUT)
    except (Failure, NothingUp, Unreachable, LauncherBusy) as error:
        note(f"error: {error}")
        sys.exit(FAILURE)
    except OSError as error:  # of the run folder: it says which path and why
        note(f"error: {error}")
        sys.exit(FAILURE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _tell(error: Exception) -> None:
    from syncline.scheduler.client import Refused

    assert isinstance(error, Refused)
    if not error.problem.errors:
        note(f"error: {error}")
    for fault in error.problem.errors:
        hint = f" ({fault.hint})" if fault.hint else ""
        note(f"error: {fault.path}: {fault.message}{hint}")


if __name__ == "__main__":
    main()

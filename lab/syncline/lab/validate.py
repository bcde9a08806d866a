"""`python -m syncline.lab.validate`: climb the validation ladder with one job spec. `syncline validate` starts it."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from syncline.contract.job import JobSpec
from syncline.contract.validation import PAGE
from syncline.contract.validation_words import levels_of, line, text
from syncline.lab.evidence import Evidence
from syncline.lab.ladder.climb import climb
from syncline.lab.ladder.records import Level, Result
from syncline.lab.ladder.rollouts import ENGINES, missing, rollouts_of
from syncline.lab.pair import one_thread


def levels(given: str) -> tuple[Level, ...]:
    """`levels_of`, as argparse wants it."""
    try:
        return levels_of(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 every level holds, 1 one fails, 2 wrong input (argparse), 130 interrupted.

    The spec comes as JSON on standard input. Levels are told on stderr as they end, the finding on stdout.
    """
    parser = argparse.ArgumentParser(prog="syncline validate")
    parser.add_argument("--models", type=Path, required=True, help="model root")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of validation.json and validation.html"
    )
    parser.add_argument("--levels", type=levels, default=levels("1-7"), metavar="1-7")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="of rollout")
    args = parser.parse_args(arguments)
    if why := missing(args.engine):
        parser.error(why)
    spec = JobSpec.model_validate_json(sys.stdin.read())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    one_thread()
    args.out.mkdir(parents=True, exist_ok=True)
    evidence = Evidence(args.out, spec, {})
    try:
        with (
            tempfile.TemporaryDirectory(prefix="syncline-validate-") as scratch,
            closing(rollouts_of(args.engine, Path(scratch))) as engines,
        ):
            report = climb(
                spec, args.models, Path(scratch), args.levels, lambda r: _tell(evidence.note(r)), engines
            )
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    report, encoded = evidence.finish(report)
    sys.stdout.write(encoded.decode() + "\n" if args.json else text(report))
    if not args.json:
        sys.stdout.write(f"figures: {args.out / PAGE}\n")
    return 0 if report.failed_at is None else 1


def _tell(result: Result) -> None:
    sys.stderr.write(line(result) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

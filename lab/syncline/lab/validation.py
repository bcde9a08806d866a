"""`python -m syncline.lab.validation JOB NUMBER [--attached]`: one validation, from its `request.json`.

Ends at SIGTERM, when `cancelled` appears in its folder, and, if `--attached`, with whoever started it: standard input
is then a pipe that nobody writes to. Begun again it climbs from the first level.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import NoReturn

from syncline.contract.job import JobSpec
from syncline.contract.validation import (
    CANCELLED,
    CLIMBED,
    FOLDER,
    LEVEL,
    REPORT,
    Check,
    Report,
    Result,
    ValidationProgress,
    ValidationRequest,
    read,
)
from syncline.contract.validation_words import boundary
from syncline.lab.evidence import Evidence, earlier
from syncline.lab.ladder.climb import climb
from syncline.lab.ladder.rollouts import missing, rollouts_of
from syncline.lab.pair import one_thread
from syncline.runtime import tracing, validations
from syncline.runtime.settings import Settings

ELSEWHERE = 75
LOOK = 0.2  # seconds between looks for `cancelled`

Tell = Callable[[Result], None]
Run = Callable[[JobSpec, Path, Tell], Report]
"""A climb: the spec, an empty folder, and whom to tell of each level that ends -> the report."""


def main(job: str, number: int, attached: bool = False) -> int:
    """0: there is a report, or a word on disk why there will be none; 75: another process is at it."""
    settings = Settings.read(os.environ)
    folder = settings.job_dir(job)
    signal.signal(signal.SIGTERM, _terminated)
    with validations.climbing(folder, number) as place:
        if place is None:
            return ELSEWHERE
        _watch(place / CANCELLED, attached)
        try:
            if not (place / REPORT).exists():
                request = validations.request_of(folder, number)
                assert request is not None, "who starts this has written the request"
                one_thread()
                carry_out(request, settings, place, _levels(request, settings))
                tracing.shutdown()
        except (ValueError, OSError) as error:
            validations.broken(place, f"{type(error).__name__}: {error}")
    return 0


def _levels(request: ValidationRequest, settings: Settings) -> Run:
    def run(spec: JobSpec, scratch: Path, tell: Tell) -> Report:
        if why := missing(spec.rollout.engine):
            raise ValueError(why)
        with closing(rollouts_of(spec.rollout.engine, scratch)) as engines:
            return climb(spec, settings.models, scratch, request.levels, tell, engines)

    return run


def carry_out(request: ValidationRequest, settings: Settings, place: Path, run: Run) -> Report:
    """Climb, telling each level on disk; the report comes last, when its spans are written. Answers with it."""
    spec = JobSpec.model_validate_json(request.spec)
    folder = settings.job_dir(request.job)
    evidence = Evidence(place, spec, earlier(_reports(folder, request), spec))
    done: list[tuple[Result, float]] = []
    levels = sorted(request.levels)

    def progress() -> None:
        results = tuple(result for result, _ in done)
        now = next((level for level in levels if level not in {result.level for result in results}), None)
        validations.note(place, ValidationProgress(results=results, now=now))

    def tell(result: Result) -> None:
        done.append((evidence.note(result), time.time()))
        progress()

    progress()
    began = time.time()
    name = request.version or str(request.number)
    tracing.setup("validation", name, None, None)  # what the ladder's engines pass is no job's path
    report = run(spec, place / validations.SCRATCH, tell)
    tracing.setup("validation", name, settings.traces_written, settings.otlp, settings.traces_sent)
    _spans(request, report, began, done)
    return evidence.finish(report)[0]


def _reports(folder: Path, request: ValidationRequest) -> Iterator[Report]:
    """Reports of the job's earlier validations of this kind, newest first."""
    for number in reversed([number for number in validations.numbers(folder) if number < request.number]):
        before, path = validations.request_of(folder, number), validations.folder_of(folder, number) / REPORT
        if before is not None and bool(before.version) == bool(request.version) and path.is_file():
            yield read(path.read_bytes(), Report)


def _spans(
    request: ValidationRequest, report: Report, began: float, done: Sequence[tuple[Result, float]]
) -> None:
    """The climb's spans, told afterwards."""
    failed = report.failed_at
    parent = tracing.record(
        CLIMBED,
        request.traceparent or None,
        began,
        time.time(),
        request.links,
        job=request.job,
        number=request.number,
        why=request.why,
        version=request.version or None,
        levels=",".join(map(str, sorted(request.levels))),
        verdict="holds" if failed is None else "fails",
        boundary=None if failed is None else boundary(failed),
        evidence=f"{request.job}/{FOLDER}/{request.number}",
    )
    for result, at in done:
        worst = _worst(result)
        tracing.record(
            LEVEL,
            parent,
            at - result.seconds,
            at,
            job=request.job,
            number=request.number,
            level=result.level,
            verdict="holds" if result.holds else "fails",
            checks=len(result.checks),
            worst=None if worst is None else worst.name,
            found=None if worst is None else f"{worst.found:.3g}",
            bound=None if worst is None else f"{worst.bound:.3g}",
        )
    tracing.flush()


def _worst(result: Result) -> Check | None:
    """The first that fails, or of those that hold the one that is nearest to its bound."""
    if result.failed:
        return result.failed[0]
    measured = [check for check in result.checks if check.bound > 0]
    return max(measured or result.checks, key=lambda c: c.found / c.bound if c.bound else 0.0, default=None)


# ---- how it ends -------------------------------------------------------------------------------------------------
def _terminated(_: int, __: FrameType | None) -> NoReturn:
    """SIGTERM: leave by way of what cleans up."""
    raise SystemExit(128 + signal.SIGTERM)


def _watch(cancelled: Path, attached: bool) -> None:
    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def look() -> None:
        while not cancelled.exists():
            time.sleep(LOOK)
        end()

    def parent() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock would be held when the interpreter ends
        end()

    for target in (look, *((parent,) if attached else ())):
        threading.Thread(target=target, daemon=True).start()


def run(arguments: Sequence[str]) -> int:
    """`main` of a command line."""
    job, number, *rest = arguments
    return main(job, int(number), "--attached" in rest)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

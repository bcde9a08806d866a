"""The folders of a job's validations: one is begun, looked at, cancelled. See `contract/validation.py`.

What state a validation is in is read from the disk alone, so that whoever takes over from a killed process knows it.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from syncline.contract.validation import (
    CANCELLED,
    FAILURE,
    FOLDER,
    LOCK,
    PROGRESS,
    REPORT,
    REQUEST,
    Report,
    Validation,
    ValidationFailure,
    ValidationProgress,
    ValidationRequest,
    ValidationState,
    read,
)
from syncline.contract.validation_words import boundary
from syncline.runtime.durable import locked, sync_folder, write_whole

T = TypeVar("T")
LOG = "validation.log"
SCRATCH = "scratch"
STARTING = 60.0  # seconds from the request within which a process may still be on its way


def folder_of(job_folder: Path, number: int) -> Path:
    """Where validation `number` of the job lies."""
    return job_folder / FOLDER / str(number)


def numbers(job_folder: Path) -> list[int]:
    """All that were begun, in order."""
    place = job_folder / FOLDER
    return sorted(int(p.name) for p in place.iterdir() if p.name.isdecimal()) if place.is_dir() else []


def begin(job_folder: Path, make: Callable[[int], ValidationRequest]) -> ValidationRequest:
    """The next validation's folder, with the request that `make` gives for its number."""
    place = job_folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    while True:
        number = max(numbers(job_folder), default=0) + 1
        try:
            (place / str(number)).mkdir()
        except FileExistsError:  # somebody else's, a moment ago
            continue
        sync_folder(place)
        request = make(number)
        write_whole(place / str(number) / REQUEST, msgspec.json.encode(request))
        return request


def request_of(job_folder: Path, number: int) -> ValidationRequest | None:
    """What was asked for; None: there is no such validation. Raises `ValueError` for one that cannot be read."""
    path = folder_of(job_folder, number) / REQUEST
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=ValidationRequest)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from None


def look(job_folder: Path, number: int, alive: bool | None = None) -> Validation | None:
    """How it stands with a validation; None: there is none. `alive`: whether its process runs; None: not known."""
    request = request_of(job_folder, number)
    if request is None:
        return None
    place = folder_of(job_folder, number)
    report = _read(place / REPORT, Report)
    if report is not None:
        return _ended(request, report)
    progress = _read(place / PROGRESS, ValidationProgress) or ValidationProgress(results=(), now=None)
    state, reason = _state(place, request, alive)
    return _view(
        request,
        state=state,
        reason=reason,
        results=progress.results,
        now=progress.now if state == "running" else None,
    )


def cancel(job_folder: Path, number: int) -> None:
    """Have whoever climbs it stop; one that has ended stays as it is."""
    write_whole(folder_of(job_folder, number) / CANCELLED, b"")


@contextmanager
def climbing(job_folder: Path, number: int) -> Iterator[Path | None]:
    """The validation's folder, with its lock held and an empty scratch folder in it; None: another process is at it."""
    place = folder_of(job_folder, number)
    with (place / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        for name in (FAILURE, PROGRESS):
            (place / name).unlink(missing_ok=True)
        shutil.rmtree(place / SCRATCH, ignore_errors=True)
        (place / SCRATCH).mkdir()
        try:
            yield place
        finally:
            shutil.rmtree(place / SCRATCH, ignore_errors=True)


def prune(job_folder: Path, keep: int) -> None:
    """Take away climbs of versions that held, all but the newest `keep`; one that did not hold stays."""
    held = []
    for number in numbers(job_folder):
        view = look(job_folder, number)
        if view is not None and view.why == "before_active" and view.state == "holds":
            held.append(number)
    for number in held[:-keep] if keep else held:
        shutil.rmtree(folder_of(job_folder, number))


def note(place: Path, progress: ValidationProgress) -> None:
    """Write down how far it is."""
    write_whole(place / PROGRESS, msgspec.json.encode(progress))


def broken(place: Path, reason: str) -> None:
    """Write down why there will be no report."""
    write_whole(place / FAILURE, msgspec.json.encode(ValidationFailure(reason=reason)))


def _state(place: Path, request: ValidationRequest, alive: bool | None) -> tuple[ValidationState, str]:
    if (place / CANCELLED).exists():
        return "cancelled", "cancelled"
    failure = _read(place / FAILURE, ValidationFailure)
    if failure is not None:
        return "broken", failure.reason
    if alive or locked(place / LOCK):
        return "running", ""
    if alive is None and not (place / LOCK).exists() and time.time() - request.at < STARTING:
        return "running", ""
    return (
        "interrupted",
        f"its process is gone and left no report; logs/{LOG} in the job's folder may say why",
    )


def _ended(request: ValidationRequest, report: Report) -> Validation:
    failed = report.failed_at
    view = _view(request, state="holds" if failed is None else "fails", results=report.results)
    return msgspec.structs.replace(
        view,
        failed_at=failed,
        boundary="" if failed is None else boundary(failed),
        diagnosis=report.diagnosis,
        recipe=report.recipe,
        model=report.model,
        contract=report.contract,
    )


def _view(request: ValidationRequest, *, state: ValidationState, **more: object) -> Validation:
    told = {
        "job": request.job,
        "number": request.number,
        "why": request.why,
        "levels": request.levels,
        "began": request.at,
        "version": request.version,
        "evidence": f"{request.job}/{FOLDER}/{request.number}",
        "state": state,
    }
    return Validation(**told, **more)  # type: ignore[arg-type]


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return read(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from None

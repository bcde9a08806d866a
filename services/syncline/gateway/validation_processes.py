"""Validations that this gateway started, as processes: one at a time for a job; they end with it.

What state a validation is in is read from the disk (`runtime/validations.py`), so that a gateway which replaces another
one, and one beside a scheduler that validates as a gate, tell the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import msgspec

from syncline.contract.validation import PAGE, Level, Validation, ValidationRequest
from syncline.gateway.records import JobRecord
from syncline.runtime import validations
from syncline.runtime.settings import Settings

MOST = 4  # processes at once, of all jobs: each takes a core and the memory of a few models
PROGRAM = "syncline.lab.validation"


class Busy(Exception):
    """The job is being validated: `view` says how far that is."""

    def __init__(self, view: Validation) -> None:
        super().__init__(f"validation {view.number} of {view.job} runs")
        self.view = view


class Full(Exception):
    """This gateway climbs for as many jobs as it may."""


class Validating:
    """The validations of this run root. `most`: processes at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self.most = settings, MOST
        self._lock = threading.Lock()
        self._started: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def unavailable(self) -> str:
        """Why none can be made on this machine; "": they can."""
        missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
        return f"the gateway's environment lacks {' and '.join(missing)}" if missing else ""

    def begin(self, record: JobRecord, levels: tuple[Level, ...], links: tuple[str, ...]) -> Validation:
        """Start to climb `levels` with the job's spec. Raises `Busy` while a climb for the job runs, and `Full`."""
        with self._lock:
            running = sum(process.poll() is None for process in self._started.values())
            for view in self.all(record):
                if view.state == "running" and view.why != "before_active":
                    raise Busy(view)
            if running >= self.most:
                raise Full(f"{running} validations run here, which is the most at once; come back later")
            request = validations.begin(
                record.folder,
                lambda number: ValidationRequest(
                    job=record.id,
                    number=number,
                    levels=levels,
                    why="asked",
                    spec=record.spec.canonical(),
                    at=time.time(),
                    links=links,
                ),
            )
            self._started[record.id, request.number] = self._start(record, request.number)
        begun = self.look(record, request.number)
        assert begun is not None, "its request lies there"
        return begun

    def _start(self, record: JobRecord, number: int) -> subprocess.Popen[bytes]:
        log = record.folder / "logs" / validations.LOG
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", PROGRAM, record.id, str(number), "--attached"],
                stdin=subprocess.PIPE,  # it ends when we do
                stdout=out,
                stderr=out,
                env=self._settings.inherited(os.environ),
            )

    def look(self, record: JobRecord, number: int) -> Validation | None:
        """How it stands with validation `number`, None: there is none."""
        view = validations.look(record.folder, number, self._alive(record.id, number))
        if view is not None and view.state == "interrupted" and _gate(record, view):
            return msgspec.structs.replace(view, state="running", reason="")
        return view

    def all(self, record: JobRecord) -> list[Validation]:
        """All of the job, in order."""
        found = [self.look(record, number) for number in validations.numbers(record.folder)]
        return [view for view in found if view is not None]

    def page(self, record: JobRecord, number: int) -> bytes | None:
        """The report as HTML, None: there is none."""
        view = self.look(record, number)
        if view is None or view.state not in ("holds", "fails"):
            return None
        return (validations.folder_of(record.folder, number) / PAGE).read_bytes()

    def cancel(self, record: JobRecord, number: int) -> Validation | None:
        """Stop it. What it was when it was asked to stop; None: it does not run."""
        view = self.look(record, number)
        if view is None or view.state != "running":
            return None
        validations.cancel(record.folder, number)
        process = self._started.get((record.id, number))
        if process is not None:  # ours need not look for the word first
            process.terminate()
        return self.look(record, number)

    def _alive(self, job: str, number: int) -> bool | None:
        process = self._started.get((job, number))
        return None if process is None else process.poll() is None


def _gate(record: JobRecord, view: Validation) -> bool:
    """Whether the scheduler's launcher is about to start it again."""
    return view.why == "before_start" and record.state == "validating"

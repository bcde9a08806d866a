"""The gate before a job's start: levels of the validation ladder, climbed by a process that the launcher keeps.

It has the turn of a job (`jobs.py`) and no machine: there are no engines yet. What it has found lies in the job's
folder, so a killed scheduler's successor finds the climb where it is, and adopts its process. When it is over the job
begins; if the gate does not open, the first event that its machine folds is `Failed`: it ends before anything starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from syncline.contract import events as e
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVENTS
from syncline.contract.validation import FOLDER, TITLES, Validation, ValidationRequest
from syncline.contract.validation_words import refusal
from syncline.runtime import validations
from syncline.runtime.bus import BadMessage, unpack
from syncline.scheduler.launch.launcher import Placement, Process
from syncline.scheduler.lookout import Tools

SERVICE = "validation"
BEAT = 1.0  # seconds between words about how far it is
DEATHS = 3  # ends of the process without a report after which the job fails


class Gate:
    """The levels of `spec.validation.before_start` on their way. `over`: the job may begin, be it to fail at once.

    say   writes fields of the job's hash
    """

    def __init__(self, tools: Tools, job: str, spec: JobSpec, say: Callable[[dict[str, str]], None]) -> None:
        self.job, self.spec = job, spec
        self.over = False
        self._tools, self._say = tools, say
        self._cursor, self._beat, self._told = "0", 0.0, ""
        self._number = self._begun()

    def _begun(self) -> int:
        """The climb that a predecessor began, or a new one."""
        folder = self._tools.settings.job_dir(self.job)
        for number in reversed(validations.numbers(folder)):
            request = validations.request_of(folder, number)
            if request is not None and request.why == "before_start":
                return number
        request = validations.begin(
            folder,
            lambda number: ValidationRequest(
                job=self.job,
                number=number,
                levels=self.spec.validation.before_start,
                why="before_start",
                spec=self.spec.canonical(),
                at=time.time(),
            ),
        )
        return request.number

    # ---- one turn, as of a job -------------------------------------------------------------------------------
    def fold(self, block: float | None) -> bool:
        """Look for a cancellation; all other events wait for the job's machine. True: there were no more."""
        key = EVENTS.at(self.job)
        entries = self._tools.bus.read({key: self._cursor}, block=block).get(key, [])
        for entry in entries:
            self._cursor = entry.id
            try:
                cancelled = isinstance(unpack(entry, e.Event), e.Cancel)
            except BadMessage:  # the machine tells of it
                continue
            self.over = self.over or cancelled
        return not entries

    def look(self) -> None:
        """Keep the process, and see what it has found."""
        view = self._view()
        if view.state in ("running", "interrupted"):
            self._keep(view)
        elif view.state == "holds" and {result.level for result in view.results} >= set(view.levels):
            self._tools.log.info("%s: levels %s hold", self.job, view.levels)
            self.over = True
        elif view.state == "fails":
            self._refuse(refusal(view.results, view.diagnosis, view.evidence))
        else:
            self._refuse(f"validation {view.number} is {view.state}: {view.reason}; figures: {view.evidence}")

    def feed(self) -> None:
        """Nothing is sampled yet."""

    def tell(self) -> None:
        """Once a second: how far it is, as a wait with its owner and deadline."""
        now = time.monotonic()
        if now - self._beat < BEAT or self.over:
            return
        self._beat = now
        view = self._view()
        wait = e.Wait(
            name="validation",
            owner=SERVICE,
            since=view.began,
            deadline=self._deadline(view),
            detail=progress(view),
        )
        told = msgspec.json.encode([wait]).decode()
        if told != self._told:
            self._say({"state": "validating", "waits": told})
            self._told = told

    def finish(self) -> bool:
        """A gate ends no job: it opens, or lets the job's machine fail."""
        return False

    # ---- the process -----------------------------------------------------------------------------------------
    def _keep(self, view: Validation) -> None:
        settings, launcher = self._tools.settings, self._tools.launcher
        if time.time() > self._deadline(view):
            self._refuse(f"{progress(view)}: not over after {self.spec.validation.wait:g} s")
            return
        name = f"{self.job}/{SERVICE}"
        process = Process(
            name=name,
            argv=(*self._tools.commands[SERVICE], self.job, str(view.number)),
            env={**settings.environ(), "SYNCLINE_JOB": self.job},
            log=settings.job_dir(self.job) / "logs" / validations.LOG,
            restart="on_failure",
            role=SERVICE,
        )
        try:
            launcher.apply(Placement(processes=(process,)))
        except ValueError as error:
            self._refuse(str(error))
            return
        seen = launcher.observe().processes.get(name)
        if seen is not None and seen.starts >= DEATHS and seen.state in ("waiting", "exited"):
            log = f"logs/{validations.LOG}"
            self._refuse(
                f"its process ended {seen.starts} times (exit {seen.exit}) without a report; see {log}"
            )

    def _refuse(self, story: str) -> None:
        """The job fails with this, as the first that its machine hears of."""
        if not self.over:
            self._tools.log.warning("%s does not start: %s", self.job, story)
            self._tools.bus.append(EVENTS.at(self.job), e.Failed(who=SERVICE, reason=story))
        self.over = True

    def _view(self) -> Validation:
        view = validations.look(self._tools.settings.job_dir(self.job), self._number)
        if view is None:
            raise FileNotFoundError(f"{self.job}/{FOLDER}/{self._number} is gone")
        return view

    def _deadline(self, view: Validation) -> float:
        return view.began + self.spec.validation.wait


def progress(view: Validation) -> str:
    """How far a climb is, in words."""
    asked = ", ".join(map(str, view.levels))
    held = ", ".join(str(result.level) for result in view.results if result.holds)
    now = "begins" if view.now is None else f"climbs level {view.now} ({TITLES[view.now][0]})"
    return f"validation {view.number} {now} of {asked}" + (f"; {held} hold" if held else "")

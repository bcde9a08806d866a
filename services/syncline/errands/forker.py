"""A job's scorer in a process of its own, seen from the worker process that asks it.

The process (`scorer.py`) is started with `exec` and few variables, so it holds the job's environment and function and
nothing of the worker's: no secret, and no Celery, Redis or tracing, whose memory and fork hooks would be the larger
part of what a fork costs. It runs each request in a sandbox. Requests and outcomes are lines of JSON.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.contract.job import JobSpec
from syncline.contract.turns import Turn
from syncline.errands.scorer import BrokenScorer, Ready, Response
from syncline.runtime import sandbox_walls
from syncline.runtime.sandbox import Outcome

_START = 120.0  # seconds until it must be ready; importing a user's module takes most of them
_GRACE = 30.0  # seconds beyond a reward's own deadline, which the process keeps itself


class Forker:
    """Starts when it is first asked, and anew when it has died. One request at a time.

    secrets   paths that the job's code shall not see
    """

    def __init__(self, spec: JobSpec, secrets: Sequence[Path] = ()) -> None:
        self._spec, self._secrets = spec, secrets
        self.missing = ""  # walls that do not stand around it; told once it has started
        self._process: subprocess.Popen[bytes] | None = None
        self._broken = ""
        self.judge = ""  # name and version, recorded with each reward; empty until it has started

    def run(self, trajectory: str, prompt: int, text: str, turns: tuple[Turn, ...] = ()) -> Outcome:
        """Score one response. Kind `lost` if the process died of it. Raises `BrokenScorer`."""
        return self.run_many([(trajectory, prompt, text, turns)])

    def run_many(self, responses: Sequence[Response]) -> Outcome:
        """Score several within the time of one; the value is a list. For a job that `scores_many`."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        request = msgspec.json.encode(responses)
        answer = self._asked(request, self._spec.reward.timeout + _GRACE)
        if answer is None:
            return Outcome(kind="lost", reason=f"its scorer's process ended with exit code {self.close()}")
        return msgspec.json.decode(answer, type=Outcome)

    def close(self) -> int:
        """End the process, and with it a sandbox that runs. Returns its exit code; 0 if there is none."""
        if self._process is None:
            return 0
        self._lines.close()
        self._wire.close()
        self._process.kill()
        code = self._process.wait()
        self._process = None
        return code

    def _start(self) -> None:
        if self._broken:
            raise BrokenScorer(self._broken)
        self._wire, theirs = socket.socketpair()
        self._lines = self._wire.makefile("rb")
        command = [sys.executable, "-m", "syncline.errands.scorer", *map(str, self._secrets)]
        with (
            theirs
        ):  # a session of its own: a terminal's interrupt is for the worker, which finishes what runs
            wire = theirs.fileno()
            env = sandbox_walls.environment(os.environ)
            self._process = subprocess.Popen(
                command, stdin=wire, stdout=wire, env=env, start_new_session=True
            )
        answer = self._asked(self._spec.canonical().encode(), _START)
        if answer is None:
            raise BrokenScorer(
                f"the scorer's process ended with exit code {self.close()} before it was ready"
            )
        ready = msgspec.json.decode(answer, type=Ready)
        if ready.broken:
            self.close()
            self._broken = ready.broken
            raise BrokenScorer(ready.broken)
        self.judge, self.missing = ready.judge, ready.missing

    def _asked(self, request: bytes, seconds: float) -> bytes | None:
        """The line that answers `request`; None: the process is dead, or does not answer in time."""
        self._wire.settimeout(seconds)
        try:
            self._wire.sendall(request + b"\n")
            return self._lines.readline() or None
        except (ConnectionError, TimeoutError):
            return None

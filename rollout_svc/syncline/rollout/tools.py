"""Steps of the environment, taken in processes of their own while the engine goes on sampling.

A process takes one step at a time; more wait in order. It keeps the step's deadline itself; one that is silent beyond
it, or has died, is ended and started anew, and the step it was at is `lost`. To a process whose steps are quick, since
its environment is our own, some that wait are sent ahead: an answer and a question for each tick would be most of a
step's time. Of a process that is ended, they wait again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.contract.job import JobSpec
from syncline.contract.turns import Turn
from syncline.environments.environment import runs_foreign_code
from syncline.rollout.stepper import Ready
from syncline.runtime import sandbox_walls
from syncline.runtime.sandbox import Outcome

_START = 120.0  # seconds until a process must be ready
_GRACE = 30.0  # seconds beyond a step's own deadline
_AHEAD = 32  # steps sent to one process of our own
_WIRE = 64 * 1024  # bytes of them


class BrokenEnvironment(ValueError):
    """The environment's process cannot be made. The message is the environment's own."""


class Answer(msgspec.Struct, frozen=True):
    """How the step of an episode ended. `key` is the asker's."""

    key: str
    outcome: Outcome


class _Asked(msgspec.Struct, frozen=True):
    """A step that is asked for. `key` "": nobody waits for it any more."""

    key: str
    line: bytes


class _Process:
    """One stepper. `asked`: the steps sent to it, in order; it is at the first."""

    def __init__(self, spec: JobSpec, secrets: Sequence[Path]) -> None:
        self._wire, theirs = socket.socketpair()
        command = [sys.executable, "-m", "syncline.rollout.stepper", *map(str, secrets)]
        env = sandbox_walls.environment(os.environ)
        with theirs:
            wire = theirs.fileno()
            self._child = subprocess.Popen(command, stdin=wire, stdout=wire, env=env, start_new_session=True)
        self._data = bytearray()
        self._wire.sendall(spec.canonical().encode() + b"\n")
        self._wire.setblocking(False)
        self._until = time.monotonic() + _START
        self._allowed = spec.turns.tool_timeout + _GRACE
        self._ahead = 1 if runs_foreign_code(spec.task) else _AHEAD
        self.ready = False
        self.asked: deque[_Asked] = deque()

    def takes(self, step: _Asked) -> bool:
        """Whether it may be sent one more now.

        Steps ahead stay within what the wire holds: while we write, it might wait for us to read.
        """
        sent = sum(len(asked.line) for asked in self.asked)
        fits = len(self.asked) < self._ahead and sent + len(step.line) <= _WIRE
        return self.ready and (not self.asked or fits)

    def ask(self, step: _Asked) -> None:
        """Send it a step."""
        if not self.asked:
            self._until = time.monotonic() + self._allowed
        self.asked.append(step)
        self._wire.setblocking(True)
        with contextlib.suppress(ConnectionError):  # dead: `line` will tell
            self._wire.sendall(step.line)
        self._wire.setblocking(False)

    def answered(self) -> _Asked:
        """It has answered the first of its steps: it is at the next."""
        self._until = time.monotonic() + self._allowed
        return self.asked.popleft()

    def cancel(self, key: str) -> None:
        """Nobody waits for this step any more."""
        none = [msgspec.structs.replace(a, key="") if a.key == key else a for a in self.asked]
        self.asked = deque(none)

    def line(self) -> bytes | None:
        """The line that it has written, or None. Raises `ConnectionError` for one that is dead or overdue."""
        dead = self._read() if b"\n" not in self._data else False
        line, found, rest = self._data.partition(b"\n")
        if found:
            self._data = rest
            return bytes(line)
        busy = bool(self.asked) or not self.ready
        if dead or (busy and time.monotonic() > self._until):
            raise ConnectionError(f"the environment's process ended with exit code {self.close()}")
        return None

    def _read(self) -> bool:
        """Read what there is. True: it has ended."""
        try:
            while part := self._wire.recv(1 << 16):
                self._data += part
        except BlockingIOError:
            return False
        return True

    def close(self) -> int:
        """End it, and with it a sandbox that runs. Returns its exit code."""
        self._wire.close()
        self._child.kill()
        return self._child.wait()


class Tools:
    """Asks for steps and tells how they ended. Its processes start with the first step.

    secrets   paths that the job's code shall not see
    """

    def __init__(self, spec: JobSpec, secrets: Sequence[Path] = ()) -> None:
        self._spec, self._secrets = spec, secrets
        self._processes: list[_Process] = []
        self._queue: deque[_Asked] = deque()

    def ask(self, key: str, index: int, turns: tuple[Turn, ...]) -> None:
        """Take the step that follows the last of `turns`, in the episode at prompt `index`."""
        self._queue.append(_Asked(key, msgspec.json.encode((index, turns)) + b"\n"))

    def cancel(self, key: str) -> None:
        """Nobody waits for this step any more. One that was sent goes on to its end, and is not told of."""
        self._queue = deque(asked for asked in self._queue if asked.key != key)
        for process in self._processes:
            process.cancel(key)

    def answers(self) -> list[Answer]:
        """Steps that have ended since, and begin those that wait. Raises `BrokenEnvironment`."""
        found: list[Answer] = []
        for process in list(self._processes):
            try:
                _hear(process, found)
            except ConnectionError as error:
                self._processes.remove(process)
                found += self._lost(process, str(error))
        self._begin()
        return found

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
        self._processes = []

    def _lost(self, process: _Process, why: str) -> list[Answer]:
        """A process has ended: the step it was at is lost, and those sent ahead wait again."""
        if not process.ready:
            raise BrokenEnvironment(f"{why} before it was ready")
        if not process.asked:
            return []
        first = process.asked.popleft()
        self._queue.extendleft(asked for asked in reversed(process.asked) if asked.key)
        return [Answer(first.key, Outcome(kind="lost", reason=why))] if first.key else []

    def _begin(self) -> None:
        idle = [process for process in self._processes if process.ready and not process.asked]
        starting = sum(not process.ready for process in self._processes)
        wanted = min(self._spec.turns.tool_processes - len(self._processes), len(self._queue) - len(idle))
        for _ in range(wanted - starting):
            self._processes.append(_Process(self._spec, self._secrets))
        while self._queue:
            takers = [process for process in self._processes if process.takes(self._queue[0])]
            if not takers:
                return
            min(takers, key=lambda process: len(process.asked)).ask(self._queue.popleft())


def _hear(process: _Process, found: list[Answer]) -> None:
    """Add what a process has answered to `found`. Raises `ConnectionError` for one that has ended."""
    while (line := process.line()) is not None:
        if not process.ready:
            _open(process, line)
        elif key := process.answered().key:
            found.append(Answer(key, msgspec.json.decode(line, type=Outcome)))


def _open(process: _Process, line: bytes) -> None:
    ready = msgspec.json.decode(line, type=Ready)
    if ready.broken:
        process.close()
        raise BrokenEnvironment(ready.broken)
    process.ready = True

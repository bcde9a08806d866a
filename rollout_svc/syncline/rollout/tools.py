"""Steps of the environment, taken in processes of their own while the engine goes on sampling.

A process takes one step at a time; more wait in order. It keeps the step's deadline itself; one that is silent beyond
it, or has died, is ended and started anew, and the step it was at is `lost`.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections import deque

import msgspec

from syncline.contract.job import JobSpec
from syncline.contract.turns import Turn
from syncline.rollout.stepper import Ready
from syncline.runtime.sandbox import Outcome

_START = 120.0  # seconds until a process must be ready
_GRACE = 30.0  # seconds beyond a step's own deadline


class BrokenEnvironment(ValueError):
    """The environment's process cannot be made. The message is the environment's own."""


class Answer(msgspec.Struct, frozen=True):
    """How the step of an episode ended. `key` is the asker's."""

    key: str
    outcome: Outcome


class _Process:
    """One stepper. `key`: whose step it takes; None: it is idle."""

    def __init__(self, spec: JobSpec) -> None:
        self._wire, theirs = socket.socketpair()
        command = [sys.executable, "-m", "syncline.rollout.stepper"]
        with theirs:
            wire = theirs.fileno()
            self._child = subprocess.Popen(command, stdin=wire, stdout=wire, start_new_session=True)
        self._data = bytearray()
        self._wire.sendall(spec.canonical().encode() + b"\n")
        self._wire.setblocking(False)
        self._until = time.monotonic() + _START
        self._allowed = spec.turns.tool_timeout + _GRACE
        self.ready = False
        self.key: str | None = None

    def ask(self, key: str, index: int, turns: tuple[Turn, ...]) -> None:
        """Begin a step. The process is idle, so nothing else is in the wire's way."""
        self.key, self._until = key, time.monotonic() + self._allowed
        self._wire.setblocking(True)
        with contextlib.suppress(ConnectionError):  # dead: `line` will tell
            self._wire.sendall(msgspec.json.encode((index, turns)) + b"\n")
        self._wire.setblocking(False)

    def line(self) -> bytes | None:
        """The line that it has written, or None. Raises `ConnectionError` for one that is dead or overdue."""
        try:
            while part := self._wire.recv(1 << 16):
                self._data += part
            dead = True
        except BlockingIOError:
            dead = False
        line, found, rest = self._data.partition(b"\n")
        if found:
            self._data = rest
            return bytes(line)
        busy = self.key is not None or not self.ready
        if dead or (busy and time.monotonic() > self._until):
            raise ConnectionError(f"the environment's process ended with exit code {self.close()}")
        return None

    def close(self) -> int:
        """End it, and with it a sandbox that runs. Returns its exit code."""
        self._wire.close()
        self._child.kill()
        return self._child.wait()


class Tools:
    """Asks for steps and tells how they ended. Its processes start with the first step."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._processes: list[_Process] = []
        self._queue: deque[tuple[str, int, tuple[Turn, ...]]] = deque()

    def ask(self, key: str, index: int, turns: tuple[Turn, ...]) -> None:
        """Take the step that follows the last of `turns`, in the episode at prompt `index`."""
        self._queue.append((key, index, turns))

    def cancel(self, key: str) -> None:
        """Nobody waits for this step any more. One that runs goes on to its end, and is not told of."""
        self._queue = deque(asked for asked in self._queue if asked[0] != key)
        for process in self._processes:
            if process.key == key:
                process.key = ""

    def answers(self) -> list[Answer]:
        """Steps that have ended since, and begin those that wait. Raises `BrokenEnvironment`."""
        found = []
        for process in list(self._processes):
            try:
                line = process.line()
            except ConnectionError as error:
                self._processes.remove(process)
                if not process.ready:
                    raise BrokenEnvironment(f"{error} before it was ready") from error
                if process.key:
                    found.append(Answer(process.key, Outcome(kind="lost", reason=str(error))))
                continue
            if line is not None and not process.ready:
                _open(process, line)
            elif line is not None:
                key, process.key = process.key, None
                if key:
                    found.append(Answer(key, msgspec.json.decode(line, type=Outcome)))
        self._begin()
        return found

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
        self._processes = []

    def _begin(self) -> None:
        idle = [process for process in self._processes if process.ready and process.key is None]
        starting = sum(not process.ready for process in self._processes)
        wanted = min(self._spec.turns.tool_processes - len(self._processes), len(self._queue) - len(idle))
        for _ in range(wanted - starting):
            self._processes.append(_Process(self._spec))
        for process in idle[: len(self._queue)]:
            process.ask(*self._queue.popleft())


def _open(process: _Process, line: bytes) -> None:
    ready = msgspec.json.decode(line, type=Ready)
    if ready.broken:
        process.close()
        raise BrokenEnvironment(ready.broken)
    process.ready = True

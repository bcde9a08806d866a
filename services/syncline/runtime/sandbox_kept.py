"""A sandbox that is kept for many calls: a fork costs milliseconds, too much where the work takes microseconds.

For code of our own alone: what one call leaves behind in the process, the next one finds. The bounds are those of
`sandbox.py`: no network where the parent has left it, no files or environment, limits on memory, file size and
processes, and for each call its processor time and its deadline. A child that did not answer with a value is ended
with all that it started, and so is one that has answered `CALLS` calls; the next call forks another.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable

from syncline.runtime import sandbox, sandbox_child
from syncline.runtime.sandbox import Limits, Outcome

CALLS = 2000  # after which a child is replaced: whatever it hoards ends then


def runner(serve: Callable[[bytes], object], limits: Limits, *, kept: bool) -> Callable[[bytes], Outcome]:
    """Runs `serve` on one request at a time, a line without its end, in a sandbox: a kept one, or one for each."""
    if kept:
        return Kept(serve, limits).run
    return lambda request: sandbox.call(functools.partial(serve, request), limits)


class Kept:
    """Forks when it is first asked. Its process must start no other children, as with `sandbox.call`."""

    def __init__(self, serve: Callable[[bytes], object], limits: Limits) -> None:
        self._serve, self._limits = serve, limits
        self._child: int | None = None
        self._calls = 0  # that the child was asked

    def run(self, request: bytes) -> Outcome:
        """What `serve(request)` came to, at most `limits.seconds` (and a little) later.

        Raises `SandboxLeak` if processes are left that cannot be killed, `OSError` if no child can be forked.
        """
        begun = time.monotonic()
        if self._child is None:
            self._fork()
        assert self._child is not None, "forked above"
        try:
            self._wire.settimeout(self._limits.seconds)
            self._wire.sendall(request.rstrip(b"\n") + b"\n")
            deadline = begun + self._limits.seconds
            data, ended = sandbox.await_result(self._child, self._wire.fileno(), deadline, line=True)
        except ConnectionError:  # it has died
            data, ended = b"", "exit"
        except TimeoutError:  # it reads nothing any more
            data, ended = b"", "deadline"
        call, self._calls = self._calls, self._calls + 1
        status = 0
        if ended != "line" or self._calls == CALLS:
            status = self.close()
        seconds = time.monotonic() - begun
        outcome = sandbox.outcome_of(data, ended, status, self._limits, seconds, call=call)
        if outcome.kind != "value" and self._child is not None:
            self.close()
        return outcome

    def close(self) -> int:
        """End the child, if there is one. Returns its wait status."""
        if self._child is None:
            return 0
        child, self._child = self._child, None
        self._wire.close()
        return sandbox.end(child, self._before)

    def _fork(self) -> None:
        self._before = sandbox.own_children()
        setting = sandbox_child.setting_of(self._limits)
        self._wire, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            sandbox_child.many(self._serve, theirs.fileno(), setting, self._limits.seconds)
        theirs.close()
        self._child, self._calls = child, 0

"""Running a function in a killable child: forked from a warm parent, limited, and gone at its deadline.

The child inherits everything that the parent has imported, so a call costs milliseconds. It has its own session and
environment, no file descriptor but its result pipe, limits on processor time, memory, file size and processes, no
privilege, and a filter of system calls (`sandbox_calls.py`) that refuses sockets unless it was given the network,
processes, signals to others, and memory that no limit counts. Its result comes back as JSON.

That holds wherever a process can be forked. What the child can see of files and other processes is bounded by the walls
that its parent has put around itself (`sandbox_walls.py`), as far as the kernel permits those. The parent's memory was
copied into the child: a parent holds nothing secret.

The caller must be a process that starts no other children meanwhile (a scorer of the errands service): whatever child
of it appears during a run and is not the sandbox itself was left behind by the function, and is killed. It should be a
small one, for a fork costs by the memory in use and by the fork hooks of what is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from syncline.runtime import sandbox_child, sandbox_walls
from syncline.runtime.sandbox_child import LIBC, MESSAGE_LIMIT, RESULT_LIMIT, Limits, Report, die_with_parent

__all__ = ["Kind", "Limits", "Outcome", "SandboxLeak", "call", "die_with_parent"]

_PR_SET_CHILD_SUBREAPER = 36
_SWEEPS = 200  # rounds of killing what a fork bomb left, before we say that we cannot

Kind = Literal["value", "raised", "timeout", "memory", "lost", "unreadable"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended.

    value       `value` is what the function returned (any JSON value)
    raised      it raised; `error` is the type's name, `passing` says that it was an `OSError`: trouble of the moment
    timeout     it was killed at its deadline, or had used up its processor time
    memory      it asked for more than its memory
    lost        the child died: exit code or signal in `reason`
    unreadable  what it returned is no JSON, or too long
    """

    kind: Kind
    value: object = None
    error: str = ""
    reason: str = ""
    passing: bool = False
    seconds: float = 0.0


class SandboxLeak(Exception):
    """Processes that a function started could not be killed: the caller must end rather than go on."""


def call(function: Callable[[], object], limits: Limits) -> Outcome:
    """Run `function` in a child of its own and return how that ended, at most `limits.seconds` (and a little) later.

    Raises `SandboxLeak` if processes are left that cannot be killed, `OSError` if no child can be forked.
    """
    begun = time.monotonic()
    before = own_children()
    reading, writing = os.pipe()
    setting = sandbox_child.setting_of(limits)
    child = os.fork()
    if child == 0:
        sandbox_child.once(function, writing, setting)
    os.close(writing)
    try:
        data, ended = await_result(child, reading, begun + limits.seconds)
    finally:
        os.close(reading)
        status = end(child, before)
    return outcome_of(data, ended, status, limits, time.monotonic() - begun)


# ---- what `sandbox_kept.py` shares
Ended = Literal["exit", "line", "deadline", "flood"]


def await_result(child: int, reading: int, deadline: float, *, line: bool = False) -> tuple[bytes, Ended]:
    """All that the child wrote until it ended, or until its deadline, or until it had written too much.

    line  a whole line is waited for, too
    """
    data = bytearray()
    os.set_blocking(reading, False)
    watched = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        poll.register(watched, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = dict(poll.poll(max(0.0, left) * 1000))
            data += _drained(reading)
            if len(data) > RESULT_LIMIT:
                return bytes(data), "flood"
            if line and data.endswith(b"\n"):
                return bytes(data), "line"
            if watched in ready:
                return bytes(data + _drained(reading)), "exit"
            if ready.get(reading, 0) & select.POLLHUP:  # closed its pipe and lives on
                poll.unregister(reading)
            if left <= 0:
                return bytes(data), "deadline"
    finally:
        os.close(watched)


def _drained(reading: int) -> bytes:
    data = bytearray()
    with contextlib.suppress(BlockingIOError):
        while len(data) <= RESULT_LIMIT and (part := os.read(reading, 65536)):
            data += part
    return bytes(data)


def end(child: int, before: set[int]) -> int:
    """Kill the child's whole process group, reap it, and sweep up after it. Returns its wait status.

    before  `own_children()` before it was forked
    """
    for kill in (os.killpg, os.kill):  # the group does not exist if it was killed before `setsid`
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    _sweep(before)
    sandbox_walls.empty_scratch()
    return status


def _sweep(before: set[int]) -> None:
    """Kill what the function left behind in sessions of its own; orphans become our children."""
    for _ in range(_SWEEPS):
        strangers = _children() - before
        if not strangers:
            return
        for pid in strangers:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
        for pid in strangers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    raise SandboxLeak(f"processes {sorted(_children() - before)} of a sandboxed function could not be killed")


def own_children() -> set[int]:
    """Children of this process, which reaps orphans of its own from now on."""
    if LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the reaper of orphaned processes")
    return _children()


def _children() -> set[int]:
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(int(pid) for pid in (thread / "children").read_text().split())
    return found


def outcome_of(
    data: bytes, ended: Ended, status: int, limits: Limits, seconds: float, *, call: int = 0
) -> Outcome:
    """What a child's answer, or its end, means.

    status  its wait status; of no meaning for a line
    call    which of its calls is to be answered: an answer to another one is none
    """
    if ended == "deadline":
        return Outcome(kind="timeout", reason=f"killed after {limits.seconds:g} s", seconds=seconds)
    if ended == "flood":
        return Outcome(kind="unreadable", reason=f"wrote over {RESULT_LIMIT} bytes", seconds=seconds)
    if ended == "exit":
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU:
            return Outcome(kind="timeout", reason="used up its processor time", seconds=seconds)
        if code < 0:
            return Outcome(kind="lost", reason=f"killed by {signal.Signals(-code).name}", seconds=seconds)
        if not data:
            return Outcome(kind="lost", reason=f"ended with exit code {code} and no result", seconds=seconds)
    try:
        report = msgspec.json.decode(data, type=Report)
    except msgspec.MsgspecError as error:
        return Outcome(kind="unreadable", reason=f"result: {error}"[:MESSAGE_LIMIT], seconds=seconds)
    if report.call != call:
        reason = f"result: answers call {report.call}, and call {call} was asked"
        return Outcome(kind="unreadable", reason=reason, seconds=seconds)
    fields = {name: getattr(report, name) for name in report.__struct_fields__ if name != "call"}
    return Outcome(**fields, seconds=seconds)

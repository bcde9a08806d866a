"""Running a function in a killable child: forked from a warm parent, limited, and gone at its deadline.

The child inherits everything that the parent has imported, so a call costs milliseconds. It has its own session and
environment, no file descriptor but its result pipe, and limits on processor time, memory, file size and processes.
Its result comes back as JSON.

This bounds what a broken or greedy function can do to the service. It is no wall against a hostile one: the child runs
under the same user, and the parent's memory was copied into it. It has no network if its parent has left it.

The caller must be a process that starts no other children meanwhile (a scorer of the errands service): whatever child
of it appears during a run and is not the sandbox itself was left behind by the function, and is killed. It should be a
small one, for a fork costs by the memory in use and by the fork hooks of what is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_RESULT_FD = 3
_RESULT_LIMIT = 64 * 1024  # bytes
_FILE_LIMIT = 16 * 1024 * 1024  # bytes that the function may write to one file
_MESSAGE_LIMIT = 500  # characters of an exception's message
_SWEEPS = 200  # rounds of killing what a fork bomb left, before we say that we cannot

Kind = Literal["value", "raised", "timeout", "memory", "lost", "unreadable"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the function may use. `memory_mb` is on top of what the parent uses already."""

    seconds: float
    memory_mb: int


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


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the child writes into its pipe, once."""

    kind: Literal["value", "raised", "memory", "unreadable"]
    value: object = None
    error: str = ""
    reason: str = ""
    passing: bool = False


def call(function: Callable[[], object], limits: Limits) -> Outcome:
    """Run `function` in a child of its own and return how that ended, at most `limits.seconds` (and a little) later.

    Raises `SandboxLeak` if processes are left that cannot be killed, `OSError` if no child can be forked.
    """
    begun = time.monotonic()
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the reaper of orphaned processes")
    before = _children()
    reading, writing = os.pipe()
    parent = os.getpid()
    bounds = _bounds(limits)
    child = os.fork()
    if child == 0:
        _child(function, writing, bounds, parent)
    os.close(writing)
    try:
        data, ended = _await(child, reading, begun + limits.seconds)
    finally:
        os.close(reading)
        status = _kill(child)
        _sweep(before)
    return _outcome(data, ended, status, limits, time.monotonic() - begun)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that forked it dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def leave_network() -> bool:
    """Leave the network, with every process forked from now on. False: the kernel does not permit it.

    The second way needs no privilege, but a process with one thread: call it before a library starts others.
    """
    return any(_LIBC.unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))


def _bounds(limits: Limits) -> dict[int, int]:
    """The child's resource limits, told here because reading /proc costs a child more than its parent."""
    wanted = {
        resource.RLIMIT_CPU: int(limits.seconds) + 1,
        resource.RLIMIT_FSIZE: _FILE_LIMIT,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,  # does not bind root; the sweep does
        resource.RLIMIT_AS: _own_memory() + limits.memory_mb * 1024 * 1024,
    }
    hard = {what: resource.getrlimit(what)[1] for what in wanted}
    return {
        w: limit if hard[w] == resource.RLIM_INFINITY else min(limit, hard[w]) for w, limit in wanted.items()
    }


def _environment_block() -> tuple[int, int]:
    """Where the kernel keeps this process's environment: env_start and env_end, fields 50 and 51 of proc(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[47]), int(fields[48])


_ENVIRONMENT = _environment_block()


# ---- the child ------------------------------------------------------------------------------------------------
def _child(function: Callable[[], object], writing: int, bounds: dict[int, int], parent: int) -> NoReturn:
    """Never returns into the parent's stack, whatever the function does."""
    try:
        report = _Report(kind="raised", error="SystemExit", reason="the sandbox could not be set up")
        try:
            _enclose(writing, bounds, parent)
            report = _valued(function())
        finally:
            error = sys.exception()
            if error is not None:
                report = _raised(error)
            _write(msgspec.json.encode(report))
    finally:
        os._exit(0)


def _enclose(writing: int, bounds: dict[int, int], parent: int) -> None:
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    # whatever stood here may write to a descriptor that is closed below
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
    os.dup2(writing, _RESULT_FD)
    os.closerange(_RESULT_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _forget_environment()
    for what, limit in bounds.items():
        resource.setrlimit(what, (limit, limit))


def _forget_environment() -> None:
    """Clear the environment, and the block of memory in which `/proc/self/environ` would still show it."""
    os.environ.clear()
    start, end = _ENVIRONMENT
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)


def _valued(value: object) -> _Report:
    try:
        body = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        return _Report(kind="unreadable", reason=f"returned what is no JSON: {error}"[:_MESSAGE_LIMIT])
    if len(body) > _RESULT_LIMIT // 2:
        return _Report(kind="unreadable", reason=f"returned {len(body)} bytes of JSON")
    if (
        isinstance(value, float) and not -1.7e308 < value < 1.7e308
    ):  # NaN or infinite: JSON has no such number
        return _Report(kind="value", value=str(value))
    return _Report(kind="value", value=value)


def _raised(error: BaseException) -> _Report:
    name = type(error).__name__
    reason = f"{name}: {error}"[:_MESSAGE_LIMIT]
    if isinstance(error, MemoryError):
        return _Report(kind="memory", error=name, reason=reason)
    passing = isinstance(error, OSError)
    return _Report(kind="raised", error=name, reason=reason, passing=passing)


def _write(body: bytes) -> None:
    while body:
        body = body[os.write(_RESULT_FD, body) :]


# ---- the parent -----------------------------------------------------------------------------------------------
def _await(child: int, reading: int, deadline: float) -> tuple[bytes, Literal["exit", "deadline", "flood"]]:
    """All that the child wrote until it ended, or until its deadline, or until it had written too much."""
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
            if len(data) > _RESULT_LIMIT:
                return bytes(data), "flood"
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
        while len(data) <= _RESULT_LIMIT and (part := os.read(reading, 65536)):
            data += part
    return bytes(data)


def _kill(child: int) -> int:
    """Kill the child's whole process group, then reap it. Returns its wait status."""
    for kill in (os.killpg, os.kill):  # the group does not exist if it was killed before `setsid`
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


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


def _children() -> set[int]:
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(int(pid) for pid in (thread / "children").read_text().split())
    return found


def _own_memory() -> int:
    """Bytes of address space that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _outcome(
    data: bytes, ended: Literal["exit", "deadline", "flood"], status: int, limits: Limits, seconds: float
) -> Outcome:
    if ended == "deadline":
        return Outcome(kind="timeout", reason=f"killed after {limits.seconds:g} s", seconds=seconds)
    if ended == "flood":
        return Outcome(kind="unreadable", reason=f"wrote over {_RESULT_LIMIT} bytes", seconds=seconds)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return Outcome(kind="timeout", reason="used up its processor time", seconds=seconds)
    if code < 0:
        return Outcome(kind="lost", reason=f"killed by {signal.Signals(-code).name}", seconds=seconds)
    if not data:
        return Outcome(kind="lost", reason=f"ended with exit code {code} and no result", seconds=seconds)
    try:
        report = msgspec.json.decode(data, type=_Report)
    except msgspec.MsgspecError as error:
        return Outcome(kind="unreadable", reason=f"result: {error}"[:_MESSAGE_LIMIT], seconds=seconds)
    fields = {name: getattr(report, name) for name in report.__struct_fields__}
    return Outcome(**fields, seconds=seconds)

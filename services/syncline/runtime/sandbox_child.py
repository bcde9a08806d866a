"""The child's side of a sandbox: what it sheds and is bound by before the function runs, and what it tells of it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import msgspec

from syncline.runtime import sandbox_calls

LIBC = ctypes.CDLL(None, use_errno=True)
RESULT_LIMIT = 64 * 1024  # bytes
MESSAGE_LIMIT = 500  # characters of an exception's message
WIRE = 3  # the child's one descriptor
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_FIRST_USER = 1_000_000
_FILE_LIMIT = 16 * 1024 * 1024  # bytes that the function may write to one file


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the function may use. `memory_mb`: on top of what the parent uses; `network`: it may make sockets."""

    seconds: float
    memory_mb: int
    network: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the child writes into its pipe, once for each function that it runs. `call`: which one, from 0."""

    kind: Literal["value", "raised", "memory", "unreadable"]
    value: object = None
    error: str = ""
    reason: str = ""
    passing: bool = False
    call: int = 0


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that forked it dies."""
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def own_memory() -> int:
    """Bytes of address space that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def bounds_of(limits: Limits) -> dict[int, int]:
    """The child's resource limits, told here because reading /proc costs a child more than its parent."""
    wanted = {
        resource.RLIMIT_CPU: int(limits.seconds) + 1,
        resource.RLIMIT_FSIZE: _FILE_LIMIT,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,  # does not bind root; the filter of system calls does
        resource.RLIMIT_AS: own_memory() + limits.memory_mb * 1024 * 1024,
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


class Setting(NamedTuple):
    """What a child must know before it is forked. `bounds`: its resource limits; `apart`: it becomes another user."""

    parent: int
    bounds: dict[int, int]
    apart: bool
    network: bool


def setting_of(limits: Limits) -> Setting:
    """The setting of the children of this process."""
    return Setting(os.getpid(), bounds_of(limits), os.geteuid() == 0 and _open_to_others(), limits.network)


@functools.cache
def _open_to_others() -> bool:
    """Whether another user could read interpreter and modules; else a child keeps its parent's user, and no rights."""
    places = [Path(place).absolute() for place in (sys.prefix, sys.base_prefix, *sys.path) if place]
    folders = {folder for place in places if place.is_dir() for folder in (place, *place.parents)}
    return all(folder.stat().st_mode & 0o001 for folder in folders)


def once(function: Callable[[], object], wire: int, setting: Setting) -> NoReturn:
    """Run one function, tell how it ended, and end. Never returns into the parent's stack, whatever it does."""
    try:
        report = Report(kind="raised", error="SystemExit", reason="the sandbox could not be set up")
        try:
            _enclose(wire, setting)
            report = _valued(function())
        finally:
            error = sys.exception()
            if error is not None:
                report = _raised(error)
            _write(msgspec.json.encode(report))
    finally:
        os._exit(0)


def many(serve: Callable[[bytes], object], wire: int, setting: Setting, seconds: float) -> NoReturn:
    """Answer each line that comes with a line, until none comes, or one does not end in a value.

    seconds  of processor time for each, on top of what the ones before have used
    """
    try:
        bounds = {what: limit for what, limit in setting.bounds.items() if what != resource.RLIMIT_CPU}
        _enclose(wire, setting._replace(bounds=bounds))
        with os.fdopen(os.dup(WIRE), "rb") as lines:
            for call, line in enumerate(lines):
                used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
                hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
                resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1, hard))
                report = Report(kind="raised", error="SystemExit", reason="it was not run")
                try:
                    report = _valued(serve(line))
                finally:
                    error = sys.exception()
                    if error is not None:
                        report = _raised(error)
                    _write(msgspec.json.encode(msgspec.structs.replace(report, call=call)) + b"\n")
                if report.kind != "value":
                    break
    finally:
        os._exit(0)


def _enclose(writing: int, setting: Setting) -> None:
    os.setsid()
    die_with_parent()
    if os.getppid() != setting.parent:  # it died before the line above
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    # whatever stood here may write to a descriptor that is closed below
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
    os.dup2(writing, WIRE)
    os.closerange(WIRE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _forget_environment()
    for what, limit in setting.bounds.items():
        resource.setrlimit(what, (limit, limit))
    _give_up_rights(setting)


def _give_up_rights(setting: Setting) -> None:
    """Become nobody in particular, who may make no call that leads out of here."""
    if setting.apart:
        number = (
            _FIRST_USER + os.getpid()
        )  # nobody else's: another sandbox cannot be signalled or looked into
        with contextlib.suppress(OSError):  # a namespace without other users; the rest holds
            os.setgroups([])
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
        die_with_parent()  # a change of user made the kernel forget it
    LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.prctl(
        _PR_SET_DUMPABLE, 1, 0, 0, 0
    )  # so that its own /proc entries are its own; its parent's are not
    LIBC.capset(struct.pack("II", 0x20080522, 0), bytes(24))
    sandbox_calls.install(LIBC, sandbox_calls.program(setting.network, os.getpid()))


def _forget_environment() -> None:
    """Clear the environment, and the block of memory in which `/proc/self/environ` would still show it."""
    os.environ.clear()
    start, end = _ENVIRONMENT
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)


def _valued(value: object) -> Report:
    try:
        body = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        return Report(kind="unreadable", reason=f"returned what is no JSON: {error}"[:MESSAGE_LIMIT])
    if len(body) > RESULT_LIMIT // 2:
        return Report(kind="unreadable", reason=f"returned {len(body)} bytes of JSON")
    if (
        isinstance(value, float) and not -1.7e308 < value < 1.7e308
    ):  # NaN or infinite: JSON has no such number
        return Report(kind="value", value=str(value))
    return Report(kind="value", value=value)


def _raised(error: BaseException) -> Report:
    name = type(error).__name__
    reason = f"{name}: {error}"[:MESSAGE_LIMIT]
    if isinstance(error, MemoryError):
        return Report(kind="memory", error=name, reason=reason)
    passing = isinstance(error, OSError)
    return Report(kind="raised", error=name, reason=reason, passing=passing)


def _write(body: bytes) -> None:
    while body:
        body = body[os.write(WIRE, body) :]

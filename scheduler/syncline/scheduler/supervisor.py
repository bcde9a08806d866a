"""The supervisor: keeps the installation's own processes running on this machine.

consumes      the environment; the launcher's state file (what an earlier supervisor left running)
produces      redis, gateway, scheduler, errands as processes; `up.json` in the run root
waits for     redis to answer, then SIGTERM or SIGINT
unblocked by  `syncline down`, Ctrl-C, a service manager

One supervisor per run root: the launcher's lock says so, and dies with its holder. A supervisor that was
killed leaves its processes running; the next one adopts them, since it asks for the same command lines (same
Redis socket, same port, both read back from `up.json`).
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from syncline.runtime.bus import Bus, BusDown, UnsafeServer
from syncline.runtime.durable import disk_full
from syncline.runtime.settings import OWN_SECRETS, Settings
from syncline.scheduler.launch.launcher import Placement, Process
from syncline.scheduler.launch.local import LocalLauncher
from syncline.scheduler.stack import (
    SERVICES,
    CannotStart,
    Up,
    gateway_port,
    is_private,
    jobs_state,
    read_up,
    redis_process,
    service_process,
    short_socket,
    stack_state,
    up_file,
)

REDIS_START = 20.0  # seconds
TICK = 0.5


class Supervisor:
    """Owns the installation's processes in one run root. Raises `LauncherBusy` when another one does.

    services   which to run; only the gateway when somebody wants to read and nothing is up
    """

    def __init__(self, environ: Mapping[str, str], services: Sequence[str] = SERVICES) -> None:
        self.settings = Settings.read(environ)
        runs = self.settings.runs
        runs.mkdir(parents=True, exist_ok=True)
        self._launcher = LocalLauncher(stack_state(runs), withhold=OWN_SECRETS)
        self._stop = threading.Event()
        previous = read_up(runs)
        external = bool(environ.get("SYNCLINE_REDIS_URL"))
        self._socket = None if external else short_socket(previous)
        self._redis_url = f"unix://{self._socket}" if self._socket is not None else self.settings.redis_url
        port = gateway_port(self.settings.host, self.settings.port, previous, self._launcher)
        self._base = [] if self._socket is None else [redis_process(runs, self._socket)]
        ports = dict.fromkeys(services, 0) | {"gateway": port}
        self._services = [
            service_process(name, self.settings, self._redis_url, ports[name]) for name in services
        ]
        scheme = "http" if self.settings.tls_cert is None else "https"
        self._up = Up(
            url=f"{scheme}://{'127.0.0.1' if self.settings.host == '0.0.0.0' else self.settings.host}:{port}",
            redis_url=self._redis_url,
            redis="external" if external else "embedded",
            supervisor=os.getpid(),
            supervisor_started=psutil.Process().create_time(),
            started_at=time.time(),
            reads_only="scheduler" not in services,
        )
        self._write_up()

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return self._up.url

    def stop(self) -> None:
        """Let `run` stop everything and return."""
        self._stop.set()

    def run(self) -> None:
        """Keep everything running until told to stop, then stop it in order. Raises `CannotStart`."""
        try:
            if self._socket is not None:
                (self.settings.runs / "redis").mkdir(exist_ok=True)
                adopted = self._launcher.observe().running()
                kept = [service for service in self._services if service.name in adopted]
                self._launcher.apply(Placement(processes=(*self._base, *kept)))
            self._await_redis()
            while not self._stop.is_set():
                self._launcher.apply(Placement(processes=(*self._base, *self._services)))
                self._note_pids()
                self._stop.wait(TICK)
        finally:
            self._stop_in_order()

    def _stop_in_order(self) -> None:
        """Scheduler first (it would start jobs' processes again), then jobs, then the others, Redis last."""
        kept = [*self._base, *(service for service in self._services if service.name != "scheduler")]
        self._shrink_to(kept)
        stop_jobs(self.settings.runs)
        self._shrink_to(self._base)
        self._launcher.stop_all()
        up_file(self.settings.runs).unlink(missing_ok=True)
        if self._socket is not None:
            remove_socket(self._socket)
        self._launcher.close()

    def _shrink_to(self, kept: Sequence[Process]) -> None:
        names = {process.name for process in kept}
        while not self._launcher.observe().running() <= names or self._stopping():
            self._launcher.apply(Placement(processes=tuple(kept)))
            time.sleep(0.05)

    def _stopping(self) -> bool:
        return any(view.state == "stopping" for view in self._launcher.observe().processes.values())

    def _await_redis(self) -> None:
        end = time.monotonic() + REDIS_START
        while self._socket is not None and not self._socket.exists() and time.monotonic() < end:
            time.sleep(0.02)
        bus = Bus(self._redis_url, deadline=REDIS_START)
        try:
            bus.ping()
            bus.require_safe_server()
        except (BusDown, UnsafeServer) as error:
            raise CannotStart(str(error)) from None
        finally:
            bus.close()

    def _note_pids(self) -> None:
        views = self._launcher.observe().processes
        pids = {name: view.pid for name, view in sorted(views.items()) if view.pid is not None}
        if pids == self._up.pids:
            return
        before, self._up = self._up, msgspec.structs.replace(self._up, pids=pids)
        try:
            self._write_up()
        except OSError as error:
            if not disk_full(error):
                raise
            self._up = before  # written once there is room

    def _write_up(self) -> None:
        path = up_file(self.settings.runs)
        new = path.with_name(path.name + ".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self._up), indent=1))
        new.replace(path)


def stop_leftovers(runs: Path) -> bool:
    """Stop what a dead supervisor left running. False: nothing. Raises `LauncherBusy` if one lives."""
    if not stack_state(runs).exists():
        return False
    launcher = LocalLauncher(stack_state(runs), withhold=OWN_SECRETS)
    found = bool(launcher.observe().running())
    launcher.stop_all()  # the scheduler goes before its jobs: it would start their processes again
    found = stop_jobs(runs) or found
    launcher.close()
    previous = read_up(runs)
    if previous is not None and previous.redis == "embedded":
        remove_socket(Path(previous.redis_url.removeprefix("unix://")))
    up_file(runs).unlink(missing_ok=True)
    return found


def stop_jobs(runs: Path) -> bool:
    """Stop the processes of all jobs. False: there was none. The scheduler must be gone."""
    if not jobs_state(runs).exists():
        return False
    jobs = LocalLauncher(jobs_state(runs), withhold=OWN_SECRETS)
    found = bool(jobs.observe().running())
    jobs.stop_all()
    jobs.close()
    return found


def remove_socket(path: Path) -> None:
    """Remove the embedded Redis' private folder."""
    if is_private(path.parent):
        shutil.rmtree(path.parent)

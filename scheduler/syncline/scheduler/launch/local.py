"""The local launcher: child processes on this machine, remembered in a file so that its next owner adopts
them instead of starting them twice.

A record is written before a process is started and again once its pid is known; every child carries a random
token in its environment. An owner that died in between is no reason to start a process twice either: the next
owner finds the child by that token.

A process is the recorded one if pid and start time agree and the machine has not been booted since. Command
lines are not compared with what runs, since servers rewrite theirs (valkey does); a wanted command line that
differs from the recorded one replaces the process.

Each child leads a session of its own. SIGTERM goes to the leader alone (a worker pool ends its own children
in order); SIGKILL, after the grace, goes to the whole group, and so does the sweep after a leader's death.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Literal

import msgspec
import psutil

from syncline.runtime.durable import disk_full
from syncline.scheduler.launch.identity import TOKEN, alive, boot, since_boot, with_token
from syncline.scheduler.launch.launcher import Launcher, Observed, Placement, Process, ProcessView

_LOG = logging.getLogger("syncline.launcher")
ALLOWED = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "TMPDIR")
ALLOWED_PREFIXES = ("SYNCLINE_", "OTEL_", "PYTHON")
FIRST_BACK_OFF = 0.2
LAST_BACK_OFF = 5.0
GOOD_LIFE = 30.0  # seconds; a process that lived so long starts again at once


class LauncherBusy(RuntimeError):
    """Another owner holds the state file."""


def child_environment(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a child: what the allow-list lets through of `base`, one thread, `extra`."""
    allowed = {k: v for k, v in base.items() if k in ALLOWED or k.startswith(ALLOWED_PREFIXES)}
    allowed.pop(TOKEN, None)
    return {**allowed, "OMP_NUM_THREADS": "1", **extra}


class _Record(msgspec.Struct, kw_only=True):
    """What the state file knows of one process. Environments may hold secrets, so only a digest is kept."""

    argv: tuple[str, ...]
    look: str  # digest of argv, environment and log
    token: str = ""
    pid: int | None = None  # None with a token: being started when the file was written
    created: float = 0.0  # seconds since boot, which clock steps do not move
    started: float = 0.0
    starts: int = 0
    restarts: int = 0
    exit: int | None = None
    dead: bool = True
    back_off: float = FIRST_BACK_OFF
    due: float = 0.0  # wall-clock second before which a dead process is not started again
    stopping: float | None = None  # wall-clock second of SIGTERM
    restart: Literal["always", "on_failure", "never"] = "always"

    def stays_down(self) -> bool:
        return self.restart == "never" or (self.restart == "on_failure" and self.exit == 0)


class _State(msgspec.Struct, kw_only=True):
    boot: str
    processes: dict[str, _Record]


class LocalLauncher(Launcher):
    """Owns child processes; see `Launcher`. `state_file`'s folder is made if need be.

    grace     seconds between SIGTERM and SIGKILL
    environ   what the allow-list chooses from; default: this process's environment
    withhold  variables that no child gets, although the allow-list lets them through
    Raises `LauncherBusy` while another owner has the same state file.
    """

    def __init__(
        self,
        state_file: Path,
        *,
        grace: float = 10.0,
        environ: Mapping[str, str] | None = None,
        withhold: Collection[str] = (),
    ) -> None:
        self._file = state_file
        self._grace = grace
        given = os.environ if environ is None else environ
        self._environ = {name: value for name, value in given.items() if name not in withhold}
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        state_file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _own(state_file.with_name(state_file.name + ".lock"))
        self._saved = b""
        try:
            self._records = _load(state_file)
        except ValueError:
            self._lock.close()
            raise
        self._adopt_unfinished_starts()

    def apply(self, placement: Placement) -> None:
        """Take the next step towards `placement`; never waits. On a full disk the step is tried again next time."""
        try:
            self._step(placement)
        except OSError as error:
            if not disk_full(error):
                raise
            _LOG.warning("%s: %s", self._file, error)

    def _step(self, placement: Placement) -> None:
        self._refresh()
        wanted = {process.name: process for process in placement.processes}
        for name in [name for name in self._records if name not in wanted]:
            if self._records[name].dead:
                del self._records[name]
            else:
                self._stop(self._records[name])
        for process in placement.processes:
            self._converge(process)
        self._save()

    def observe(self) -> Observed:
        """What is there now. Zombies count as dead."""
        self._refresh()
        return Observed(processes={name: _view(name, record) for name, record in self._records.items()})

    def stop_all(self) -> None:
        """SIGTERM to all, SIGKILL after the grace; returns once they are gone."""
        self.apply(Placement())
        while self._records:
            time.sleep(0.02)
            self.apply(Placement())

    def close(self) -> None:
        """Give up ownership; the processes run on."""
        try:
            self._save()
        except OSError as error:
            if not disk_full(error):
                raise
            _LOG.warning("%s: %s", self._file, error)  # a start that is not noted is found by its token
        self._lock.close()

    # ---- one process ---------------------------------------------------------------------------------------
    def _converge(self, process: Process) -> None:
        record = self._records.get(process.name)
        env = child_environment(self._environ, process.env)
        look = _look(process, env)
        if record is not None and not record.dead:
            if record.look != look:
                self._stop(record)
            if record.stopping is not None:
                self._stop(record)
            return
        if record is None or record.look != look:
            fresh = _Record(argv=process.argv, look=look, starts=record.starts if record else 0)
            record = self._records[process.name] = fresh
        elif record.stopping is not None:  # it was not wanted for a while, and is again
            record.stopping, record.due = None, 0.0
        elif record.starts and (record.stays_down() or time.time() < record.due):
            return
        else:
            record.restarts += record.starts > 0
        record.restart = process.restart
        self._start(process, record, env)

    def _start(self, process: Process, record: _Record, env: dict[str, str]) -> None:
        record.token, record.pid = secrets.token_hex(8), None
        self._save()
        process.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with process.log.open("ab") as log:
                child = subprocess.Popen(
                    process.argv,
                    env={**env, TOKEN: record.token},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            record.token = ""
            if disk_full(error):
                raise
            raise ValueError(f"process {process.name!r} cannot be started: {error}") from None
        self._children[child.pid] = child
        record.pid, record.created = child.pid, since_boot(psutil.Process(child.pid))
        record.started, record.dead, record.exit = time.time(), False, None
        record.starts += 1
        self._save()

    def _stop(self, record: _Record) -> None:
        """SIGTERM once, SIGKILL to the group after the grace."""
        if record.pid is None or record.dead:
            return
        try:
            if record.stopping is None:
                record.stopping = time.time()
                os.kill(record.pid, signal.SIGTERM)
            elif time.time() - record.stopping > self._grace:
                os.killpg(record.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it died by itself; the next refresh records that

    # ---- what is there -------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        for record in self._records.values():
            pid = None if record.dead else record.pid
            if pid is not None and not alive(pid, record.created, self._children.get(pid)):
                self._bury(record, pid)

    def _bury(self, record: _Record, pid: int) -> None:
        child = self._children.pop(pid, None)
        record.exit, record.dead, record.pid = None if child is None else child.wait(), True, None
        if time.time() - record.started > GOOD_LIFE:
            record.back_off = FIRST_BACK_OFF
        record.due = time.time() + record.back_off
        record.back_off = min(LAST_BACK_OFF, 2 * record.back_off)
        for orphan in with_token(record.token):
            orphan.kill()

    def _adopt_unfinished_starts(self) -> None:
        for record in self._records.values():
            record.due = min(record.due, time.time() + LAST_BACK_OFF)  # the clock may have been set back
            if record.pid is None and record.dead and record.token:
                for found in with_token(record.token):
                    if os.getpgid(found.pid) == found.pid:
                        record.pid, record.created, record.dead = found.pid, since_boot(found), False
                        record.started, record.starts = found.create_time(), record.starts + 1

    def _save(self) -> None:
        state = msgspec.json.encode(_State(boot=boot(), processes=self._records))
        if state == self._saved:
            return
        temporary = self._file.with_name(self._file.name + ".new")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.format(state, indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file)
        self._saved = state


def _load(state_file: Path) -> dict[str, _Record]:
    if not state_file.exists():
        return {}
    try:
        state = msgspec.json.decode(state_file.read_bytes(), type=_State)
    except msgspec.MsgspecError as error:
        raise ValueError(f"launcher state {state_file}: {error}") from None
    if state.boot != boot():
        for record in state.processes.values():
            record.dead, record.pid, record.token = True, None, ""
    return state.processes


def _view(name: str, record: _Record) -> ProcessView:
    state: Literal["running", "waiting", "stopping", "exited"]
    if not record.dead:
        state = "running" if record.stopping is None else "stopping"
    else:
        state = "exited" if record.stays_down() else "waiting"
    return ProcessView(
        name=name,
        state=state,
        pid=record.pid,
        exit=record.exit,
        starts=record.starts,
        restarts=record.restarts,
        since=record.started,
    )


def _look(process: Process, env: Mapping[str, str]) -> str:
    parts = [process.argv, sorted(env.items()), str(process.log)]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _own(lock_file: Path) -> IO[bytes]:
    lock = lock_file.open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise LauncherBusy(f"another launcher owns {lock_file}") from None
    return lock

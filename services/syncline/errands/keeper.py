"""Keeps a process for each job whose HTTP judge is to be asked (`judge.py`), in the errands service's own process.

A process that ends by itself has found its job over and taken it off the list. One that dies is started again, later
each time. Where several errands services run, each keeps one and a lease decides which of them asks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import msgspec

from syncline.contract.streams import JUDGED
from syncline.runtime.service import ServiceContext

_TURN = 0.25  # seconds between looks
_LONGEST = 30.0  # seconds before one that keeps dying is started again
_CALM = 60.0  # seconds of life after which a death counts as the first
_LEAVE = 5.0  # seconds to end by itself


class _Kept(msgspec.Struct):
    pid: int | None = None  # None: to be started
    started: float = 0.0
    deaths: int = 0
    not_before: float = 0.0


class Keeper:
    """The judge processes of this machine."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._kept: dict[str, _Kept] = {}

    def until(self, stopping: threading.Event) -> None:
        """Keep them until `stopping`, then end them all."""
        try:
            while not stopping.wait(_TURN):
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        listed = {raw.decode() for raw in self._context.bus.zrange(JUDGED.at())}
        now = time.monotonic()
        for job, kept in list(self._kept.items()):
            if kept.pid is not None and (code := _exit_code(kept.pid)) is not None:
                self._ended(job, kept, code, now)
        for job in listed:
            kept = self._kept.setdefault(job, _Kept())
            if kept.pid is None and now >= kept.not_before:
                kept.pid, kept.started = self._start(job), now

    def _ended(self, job: str, kept: _Kept, code: int, now: float) -> None:
        if code == 0:
            del self._kept[job]
            return
        kept.deaths = 1 if now - kept.started > _CALM else kept.deaths + 1
        pause = min(0.25 * 2**kept.deaths, _LONGEST)
        self._context.log.warning("%s: its judge process died (exit %d); again in %.1f s", job, code, pause)
        kept.pid, kept.not_before = None, now + pause

    def _start(self, job: str) -> int:
        """Start one; its pid.

        Not by `subprocess`: the pool may fork a worker meanwhile, which would keep the pipe open on whose end
        `subprocess` waits.
        """
        env = self._context.settings.inherited(os.environ)
        env.pop("SYNCLINE_PORT", None)  # this service's own
        env |= {"SYNCLINE_JOB": job, "SYNCLINE_WORKER": "judge"}
        command = [sys.executable, "-m", "syncline.errands.judge"]
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        # a session of its own: a terminal's interrupt is for the service, which ends it
        return os.posix_spawn(sys.executable, command, env, file_actions=[nothing], setsid=True)

    def _end(self) -> None:
        running = {kept.pid for kept in self._kept.values() if kept.pid is not None}
        for number, seconds in ((signal.SIGTERM, _LEAVE), (signal.SIGKILL, _LEAVE)):
            for pid in running:
                os.kill(pid, number)
            last = time.monotonic() + seconds
            while running and time.monotonic() < last:
                running -= {pid for pid in running if _exit_code(pid) is not None}
                time.sleep(0.02)


def _exit_code(pid: int) -> int | None:
    """Exit code of a child, negative for a signal; None: it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None

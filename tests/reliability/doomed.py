"""A trainer in a process of its own that dies, or freezes, at a named point between reading and forgetting.

Processes are forked from a server that has imported everything and runs no thread, so one costs little and `kill -9`
is real. In the child the frame, the loop and all parts are the product's; the engine is `FingerprintEngine`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["doomed", "fingerprint", "syncline.trainer.loop", "syncline.trainer.assembly"]
)
LEASE = 2.0  # seconds, where the product has 10
BLIND = 600.0  # seconds of a lease that is not renewed while a test runs: a frozen process finds out by what it does


@dataclass(frozen=True)
class Point:
    """Where it dies: an attribute of a module or class, before or after it has done its work."""

    module: str
    owner: str  # "": the module itself
    name: str
    after: bool


def _point(where: str, after: bool) -> Point:
    module, _, rest = where.partition(":")
    owner, _, name = rest.rpartition(".")
    return Point(module, owner, name, after)


def _points() -> dict[str, Point]:
    places = {
        "read": "syncline.trainer.intake:Intake.segment",
        "segment": "syncline.runtime.segments:write_new",
        "backward": "fingerprint:FingerprintEngine.backward",
        "optimizer step": "fingerprint:FingerprintEngine.optimize",
        "scores": "syncline.runtime.segments:write_scores",
        "endings": "syncline.trainer.intake:Intake.end_unused",
        "acknowledge": "syncline.runtime.ledger:Ledger.trained",
        "export": "fingerprint:FingerprintEngine.export",
        "announce": "syncline.trainer.minting:Mint._announce",
        "metrics": "syncline.trainer.updating:Updating.tell_metrics",
        "checkpoint": "syncline.trainer.checkpoint:Checkpoints.save",
        "checkpoint's weights": "fingerprint:FingerprintEngine.save",
        "checkpoint's manifest": "syncline.trainer.checkpoint:write_whole",
        "checkpoint's name": "pathlib:Path.rename",
        "pruning": "syncline.trainer.checkpoint:Checkpoints._prune",
        "forgetting": "syncline.runtime.ledger:Ledger.forget",
    }
    return {
        f"{'after' if after else 'before'} {name}": _point(where, after)
        for name, where in places.items()
        for after in (False, True)
    }


POINTS: dict[str, Point] = _points()
RESUMING: dict[str, Point] = {
    "resume: loaded": _point("fingerprint:FingerprintEngine.load", True),
    "resume: settled": _point("syncline.trainer.resume:Resume._settle", True),
    "resume: epoch taken": _point("syncline.trainer.resume:next_epoch", True),
    "resume: repeated": _point("syncline.trainer.resume:Resume._repeat", True),
    "resume: given back": _point("syncline.runtime.ledger:Ledger.unclaim", True),
}
"""Points that only a trainer which follows a dead one passes; some not even that one."""


class Trainer:
    """A trainer process. `ended` once it has; `struck`: by its own fault.

    freeze   it is stopped at its fault, and not killed; its lease is then of `BLIND` seconds
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        log: Path,
        fault: tuple[str, int] | None = None,
        freeze: bool = False,
        lease: float = LEASE,
    ) -> None:
        point = None if fault is None else (POINTS | RESUMING)[fault[0]]
        call = 0 if fault is None else fault[1]
        number = signal.SIGSTOP if freeze else signal.SIGKILL
        args = (dict(environ), str(log), point, call, int(number), BLIND if freeze else lease)
        self.process: ForkServerProcess = CONTEXT.Process(target=serve, args=args, daemon=True)
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def ended(self) -> bool:
        return not self.process.is_alive()

    @property
    def struck(self) -> bool:
        return self.process.exitcode == -signal.SIGKILL

    @property
    def frozen(self) -> bool:
        return not self.ended and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self, seconds: float = 30.0) -> None:
        """SIGTERM, and SIGKILL for one that does not leave."""
        if not self.ended:
            self.process.terminate()
            self.process.join(seconds)
        self.kill()

    def kill(self) -> None:
        if not self.ended:
            self.process.kill()
        self.process.join(10)


def serve(
    environ: Mapping[str, str], log: str, point: Point | None, call: int, number: int, lease: float
) -> None:
    """Runs in the child."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(environ)
    import fingerprint

    from syncline.runtime import service
    from syncline.runtime.lease import Lease
    from syncline.trainer import assembly, loop

    Lease.__init__.__defaults__ = (lease,)
    assembly.__dict__["build_engine"] = fingerprint.FingerprintEngine
    if point is not None:
        strike(point, call, number)
    service.run("trainer", loop.main)


def strike(point: Point, call: int, number: int) -> None:
    """Let this process get signal `number` in the `call`-th call of a function."""
    owner: Any = sys.modules[point.module]
    for part in filter(None, point.owner.split(".")):
        owner = getattr(owner, part)
    real: Callable[..., Any] = getattr(owner, point.name)
    calls = 0

    def doomed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = calls == call
        if mine and not point.after:
            os.kill(os.getpid(), number)
        result = real(*args, **kwargs)
        if mine and point.after:
            os.kill(os.getpid(), number)
        return result

    setattr(owner, point.name, doomed)

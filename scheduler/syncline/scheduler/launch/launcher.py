"""What a launcher is: `apply` a wanted placement, `observe` the real one.

Both are level-triggered and idempotent. `apply` never waits for a process: it takes the next step towards the
wanted placement and returns, so its owner calls it again and again (about every second) with the same value.
`observe` changes no process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import msgspec

RestartPolicy = Literal["always", "on_failure", "never"]


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One process that is wanted.

    `name` is unique inside its placement. `env` is added to the launcher's own allowed environment. `log`
    receives stdout and stderr, appended. A process whose `argv`, `env` or `log` changes is replaced.

    What only launchers of pods ask for: `role`, the service that it is ("rollout", "trainer", "sync"); `devices`, the
    set of devices that it shares with the others that name the same ("": it has devices of its own, or none);
    `start`, seconds that it may take to load.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    log: Path
    restart: RestartPolicy = "always"
    role: str = ""
    devices: str = ""
    start: float = 180.0


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All processes that should run. Nothing else of this launcher's may run."""

    processes: tuple[Process, ...] = ()

    def __post_init__(self) -> None:
        names = [process.name for process in self.processes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"placement names {', '.join(twice)} more than once")
        for process in self.processes:
            if not process.argv:
                raise ValueError(f"process {process.name!r} has no argv")


class ProcessView(msgspec.Struct, frozen=True, kw_only=True):
    """One process as it is.

    `waiting`: dead, and the launcher starts it again once its back-off is over. `exited`: dead, and its
    restart policy leaves it so. `stopping`: told to end. `exit` is the last exit code seen (negative: signal
    number; None: none yet, or the process was adopted and its code cannot be known). `starts` counts all
    starts, so it rises whenever another process took the name, however short it lived.
    """

    name: str
    state: Literal["running", "waiting", "stopping", "exited"]
    pid: int | None
    exit: int | None
    starts: int
    restarts: int  # starts that followed a death
    since: float  # wall-clock unix seconds of the last start


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What runs, by name."""

    processes: dict[str, ProcessView]

    def running(self) -> frozenset[str]:
        """Names of the processes that run."""
        return frozenset(name for name, view in self.processes.items() if view.state == "running")


class Launcher(Protocol):
    """Owns the processes of one placement. One owner at a time: a second one is refused.

    `fixed` says why the number of a role's processes cannot change while the others run; "": it can.
    """

    fixed: str = ""

    def apply(self, placement: Placement) -> None:
        """Take the next step towards `placement`. Raises `ValueError` for one that cannot start."""

    def observe(self) -> Observed:
        """What is there now."""

    def stop_all(self) -> None:
        """End every process and wait until they are gone."""

    def close(self) -> None:
        """Give up ownership and leave the processes running, for the next owner to adopt."""

"""Which process is which: a recorded pid is believed only together with its start time, and a token finds the
processes whose pid nobody could record.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil

TOKEN = "SYNCLINE_LAUNCH"  # variable that every child carries
SAME_START = 2.0  # seconds; start times come by way of a boot time that the kernel rounds to seconds
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot() -> str:
    """What tells this boot of the machine from others; "" where the system does not say."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


def since_boot(process: psutil.Process) -> float:
    """Start time in seconds since boot, which clock steps do not move."""
    return float(process.create_time() - psutil.boot_time())


def alive(pid: int, created: float, child: subprocess.Popen[bytes] | None = None) -> bool:
    """Whether the process with this pid and start time still runs. A zombie does not.

    child   it, if this process has started it: the system tells then, and tells of no other
    """
    if child is not None:
        return child.poll() is None
    try:
        process = psutil.Process(pid)
        same = abs(since_boot(process) - created) < SAME_START
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def with_token(token: str) -> Iterable[psutil.Process]:
    """Processes that carry `token` in their environment: the child, and what it started."""
    for process in psutil.process_iter():
        try:
            if token and process.environ().get(TOKEN) == token:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue

"""The SGLang server of a job's worker, as the operating system knows it."""

from __future__ import annotations

import os
import signal

import psutil
from stack import Stack
from waiting import wait_until


def servers(stack: Stack) -> list[psutil.Process]:
    """The processes whose command line starts a server, below worker w0."""
    pid = stack.pid("w0")
    if pid is None:
        return []
    children = [c for c in psutil.Process(pid).children() if c.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if any(part.endswith("serve.py") for part in child.cmdline())]


def kill_the_server(stack: Stack) -> None:
    """`kill -9`; returns once its worker has started another."""
    (server,) = servers(stack)
    os.kill(server.pid, signal.SIGKILL)

    def another() -> bool:
        return [found.pid for found in servers(stack)] not in ([], [server.pid])

    wait_until(another, 120, "another server below the same worker")

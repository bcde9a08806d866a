"""A service for tests: `python service_main.py BEHAVIOUR`."""

from __future__ import annotations

import sys

from syncline.contract.events import WorkerUp
from syncline.runtime.service import ServiceContext, run


def wait(context: ServiceContext) -> None:
    """Be ready until told to stop."""
    context.ready(True)
    context.emit(WorkerUp(who=context.name, incarnation=context.incarnation))
    context.stopping.wait(120)


def hold(context: ServiceContext) -> None:
    """Be the only one of its kind, then as `wait`."""
    context.ready(False, "waits for the lease")
    context.lease("sync")
    wait(context)


def fail(context: ServiceContext) -> None:
    """Find something impossible."""
    raise KeyError("no such tensor")


def fail_in_thread(context: ServiceContext) -> None:
    """The same, where nobody waits for it."""
    context.thread("loader", lambda: fail(context))
    context.stopping.wait(120)


if __name__ == "__main__":
    run("sync", {"wait": wait, "hold": hold, "fail": fail, "fail_in_thread": fail_in_thread}[sys.argv[1]])

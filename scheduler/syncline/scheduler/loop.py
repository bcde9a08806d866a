"""The scheduler's loop: one running job, its machine, and the queue behind it.

consumes      requests of users (`requests`); the running job's `events`; the launcher's and the ledger's state
produces      `phase` and `phases`, `work`, `samples`; events of its own (`BatchReady`, `Drained`, `WorkerLost`,
              ...); state, reason and waits in the job hash; the job's processes, folder and key
waits for     its lease; then for events, at most `TICK`; every other wait is a named one of the job (`waits.py`)
unblocked by  any event of the job, any request, and the clock

A turn folds events until there are none, then compares the world with what the machine knows and tells it the
difference, as events that the next turn folds. Nothing is remembered that is not saved or seen again.
"""

from __future__ import annotations

from syncline.runtime.errands import Errands
from syncline.runtime.service import ServiceContext
from syncline.scheduler.choosing import commands_of, launcher_of
from syncline.scheduler.launch.launcher import Launcher, Placement
from syncline.scheduler.lookout import Tools
from syncline.scheduler.placement import Commands
from syncline.scheduler.queue import Queue
from syncline.scheduler.returning import bring_back
from syncline.scheduler.saved import SERVICE

TICK = 0.1  # seconds of waiting for events in one turn
IDLE = 0.5  # seconds of waiting for requests while no job runs


def main(ctx: ServiceContext, commands: Commands | None = None) -> None:
    """The installation's scheduler, until it is told to stop. Jobs' processes run on for the next one."""
    ctx.ready(False, "waits for the scheduler's lease")
    ctx.lease(SERVICE)
    launcher = launcher_of(ctx)
    errands = Errands(ctx.settings.redis_url)
    run_by = commands or commands_of(ctx.settings)
    tools = Tools(ctx.bus, ctx.incarnation, ctx.settings, launcher, errands, run_by, ctx.log)
    ctx.ready(True)
    bring_back(ctx.bus, ctx.incarnation, ctx.settings.runs, launcher, ctx.log)
    try:
        run(ctx, Queue(tools), launcher)
    finally:
        launcher.close()
        errands.close()


def run(ctx: ServiceContext, queue: Queue, launcher: Launcher) -> None:
    """Turn after turn."""
    while not ctx.stop_requested():
        ctx.require_same_server()
        job = queue.choose()
        queue.take_requests(block=IDLE if job is None else None)
        if job is None:
            launcher.apply(Placement())
            continue
        if job.fold(block=TICK):
            job.look()
            job.feed()
        job.tell()
        if job.finish():
            queue.release()

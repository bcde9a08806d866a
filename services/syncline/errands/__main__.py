"""`python -m syncline.errands`: the errands service.

It has as many worker processes as cores, at most 4, unless `--concurrency` says otherwise.
This process holds the connection to Celery's queue and the heartbeat; each of its children has a process per job
that scores (`scorer.py`). A child that dies is replaced, and its message is delivered again. HTTP judges are asked by
processes that this one keeps (`keeper.py`), so that a slow one holds nobody.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from syncline.errands.keeper import Keeper
from syncline.errands.loop import Scoring
from syncline.runtime import tracing
from syncline.runtime.bus import Bus
from syncline.runtime.errands import Errands, ScoreErrand, WorkerWatch, serve
from syncline.runtime.sandbox import die_with_parent
from syncline.runtime.service import ServiceContext, run
from syncline.runtime.settings import Settings


class Child:
    """What one worker process holds; made after the fork."""

    def __init__(self, settings: Settings) -> None:
        self.redis_url, self.secrets = settings.redis_url, settings.secrets
        self.scoring: Scoring | None = None

    def prepare(self) -> None:
        """Runs first in the worker process, so that nothing here is shared with the one that forked it."""
        die_with_parent()
        self.scoring = Scoring(Bus(self.redis_url), Errands(self.redis_url), self.secrets)

    def score(self, job: str, errands: Sequence[ScoreErrand]) -> None:
        """Runs for each message."""
        assert self.scoring is not None, "a worker process takes messages before it was prepared"
        self.scoring.score(job, errands)


def main(context: ServiceContext, concurrency: int) -> None:
    """Serve until told to stop."""
    url = context.settings.redis_url
    child = Child(context.settings)
    watch = WorkerWatch(context.bus)
    keeper = Keeper(context)
    context.thread("watch", lambda: watch.until(context.stopping))
    keeping = context.thread("keeper", lambda: keeper.until(context.stopping))
    context.ready(True)
    serve(
        url,
        child.score,
        concurrency=concurrency,
        prepare=child.prepare,
        leave=tracing.shutdown,
        stopping=context.stopping,
    )
    context.stopping.set()
    keeping.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m syncline.errands", description="The errands service.")
    cores = len(os.sched_getaffinity(0))
    told = "worker processes (default: one per core, at most 4)"
    parser.add_argument("--concurrency", type=int, default=min(4, cores), help=told)
    arguments = parser.parse_args()
    if arguments.concurrency < 1:
        sys.exit("--concurrency must be at least 1")
    run("errands", lambda context: main(context, arguments.concurrency))

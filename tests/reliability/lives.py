"""Runs one job over any number of trainers' lives, and says what the faults did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from doomed import Trainer
from field import Field
from verdict import Verdict, judge

SECONDS = 60.0  # for the whole of a small job, faults included


@dataclass
class Story:
    """struck     faults that really happened, in order
    recovered  seconds from each to the next version, in the order of `struck`
    """

    verdict: Verdict
    struck: list[str] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)


def live(
    job: Field,
    faults: Sequence[tuple[str, int]] = (),
    disturb: Callable[[Field], None] | None = None,
    seconds: float = SECONDS,
) -> Story:
    """Run `job` to its end. The n-th trainer has the n-th of `faults`, (point, call); the last has none.

    disturb   called once a turn, to do other harm
    """
    struck: list[str] = []
    recovered: list[float] = []
    log = job.folder / "trainer.log"
    end = time.monotonic() + seconds
    for fault in (*faults, None):
        trainer = Trainer(job.environ(), log, fault)
        try:
            began, known = time.monotonic(), set(job.versions())

            def over() -> bool:
                if disturb is not None:
                    disturb(job)
                if len(struck) > len(recovered) and set(job.versions()) - known:
                    recovered.append(time.monotonic() - began)
                return trainer.ended or job.finished()

            job.until(over, max(1.0, end - time.monotonic()), f"the end of a trainer with fault {fault}")
            if trainer.ended and trainer.struck and fault is not None:
                job.lease_runs_out()
                struck.append(f"{fault[0]}, call {fault[1]}")
                recovered += [time.monotonic() - began] * (len(struck) - 1 - len(recovered))
                continue
            assert not trainer.ended, f"a trainer ended by itself: {tail(log)}"
            if len(struck) > len(recovered):
                recovered.append(time.monotonic() - began)
            break
        finally:
            trainer.kill()
    job.end()
    return Story(judge(job), struck, recovered)


def tail(log: Path) -> str:
    return log.read_text()[-3000:] if log.exists() else "no log"

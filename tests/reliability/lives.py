"""Runs one job over any number of trainers' lives, and says what the faults did."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from doomed import Trainer
from field import Field
from harms import Harm
from own_redis import OwnRedis
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


class Life:
    """One trainer's life, of a job whose `story` so far it goes on with."""

    def __init__(self, job: Field, story: Story, fault: tuple[str, int] | None) -> None:
        self.job, self.story, self.fault = job, story, fault
        self.began, self.known = time.monotonic(), set(job.versions())
        self.trainer = Trainer(job.environ(), job.folder / "trainer.log", fault)

    def over(self) -> bool:
        """Whether it has ended, or the job has. Notes on the way when the job went on after the fault before."""
        if set(self.job.versions()) - self.known:
            self.went_on()
        return self.trainer.ended or self.job.finished()

    def went_on(self) -> None:
        if len(self.story.struck) > len(self.story.recovered):
            self.story.recovered.append(time.monotonic() - self.began)

    def struck(self) -> bool:
        """Whether its fault has ended it; written down then."""
        if self.fault is None or not (self.trainer.ended and self.trainer.struck):
            return False
        self.went_on()
        self.job.lease_runs_out()
        self.story.struck.append(f"{self.fault[0]}, call {self.fault[1]}")
        return True


def live(
    job: Field,
    faults: Sequence[tuple[str, int]] = (),
    disturb: Callable[[Field], None] | None = None,
    seconds: float = SECONDS,
    restart: bool = False,
) -> Story:
    """Run `job` to its end. The n-th trainer has the n-th of `faults`, (point, call); the last has none.

    disturb   called before each turn, to do other harm
    restart   a trainer that ends by itself is replaced, as the launcher does; the job's failure is none of that
    """
    story = Story(Verdict([], [], []))
    job.before = disturb
    end = time.monotonic() + seconds
    lives = deque([*faults, None])
    while lives:
        life = Life(job, story, lives.popleft())
        try:
            job.until(life.over, max(1.0, end - time.monotonic()), f"the end of a trainer with {life.fault}")
            if life.struck():
                continue
            if life.trainer.ended and restart:
                lives.appendleft(None)
                continue
            assert not life.trainer.ended, f"a trainer ended by itself: {tail(job.folder / 'trainer.log')}"
            life.went_on()
            break
        finally:
            life.trainer.kill()
    job.end()
    story.verdict = judge(job)
    return story


def harmed(job: Field, harm: Harm, server: OwnRedis | None, times: int, seed: int) -> Story:
    """Run `job` to its end while `harm` is done to it `times` times, at turns that `seed` decides.

    Two updates are held back for each time that is still to come, so that the job cannot be over before; after it,
    they show that the job goes on. Where a harm is due, one group more comes just before it: less than an update, so
    the trainer leaves it alone, and there is work to take, or a record, whatever else was used up.
    """
    batch = job.spec.batch.groups
    assert batch > 1
    assert 2 * times < job.spec.schedule.updates
    drawn = random.Random(seed)
    done: list[float] = []
    recovered: list[float] = []
    state = {"wait": drawn.randint(1, 6), "known": -1}

    def hold() -> None:
        job.held_back = 2 * batch * (times - len(done)) if harm.held else 0

    def disturb(job: Field) -> None:
        versions = job.versions()
        newest = max((v.number for v in versions), default=-1)
        if len(done) > len(recovered) and newest > state["known"]:
            recovered.append(time.monotonic() - done[-1])
        state["wait"] -= 1
        if newest < 0 or state["wait"] > 0 or len(done) >= times or len(done) > len(recovered):
            return
        job.feed(least=1 if harm.held else 0)
        if harm.do(job, server):
            done.append(time.monotonic())
            state["known"] = max((v.number for v in job.versions()), default=-1)
            state["wait"] = drawn.randint(1, 6)
        hold()

    hold()
    story = live(job, disturb=disturb, restart=True)
    return Story(story.verdict, [harm.name] * len(done), recovered)


def tail(log: Path) -> str:
    return log.read_text()[-3000:] if log.exists() else "no log"

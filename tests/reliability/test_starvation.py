"""Nothing to do, nothing of use, or far too much: no deadlock, no busy spin, the bound holds, the job says why."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest
from doomed import Trainer
from field import Field, Worker
from lives import live, tail
from own_redis import OwnRedis
from waiting import wait_until

from syncline.contract import events
from syncline.contract.version_path import VersionId
from syncline.rollout.intake import Held

BUSY = 0.4  # of one core: what a process that only waits may take, its heartbeat and its polls


def busy(pid: int, seconds: float) -> float:
    """The share of one core that a process takes."""
    process = psutil.Process(pid)
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    wait_until(lambda: time.monotonic() - began >= seconds, seconds + 5, "time to pass", every=0.1)
    return float((sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began))


def test_a_trainer_without_a_batch_waits_quietly_and_says_what_it_waited_for(
    field_of: Callable[..., Field],
) -> None:
    job = field_of(limits={"batch_wait": 3.0})
    trainer = Trainer(job.environ(), job.folder / "trainer.log")
    try:
        wait_until(job.versions, 30, "the first version")
        assert busy(trainer.pid, 2.0) < BUSY
        wait_until(lambda: trainer.ended, 20, "the end of a wait that nobody ends")
    finally:
        trainer.kill()
    reasons = [event.reason for event in job.said() if isinstance(event, events.Failed)]
    assert len(reasons) == 1
    assert "no batch for update 1 within" in reasons[0]


def test_a_trainer_whose_redis_is_away_does_not_spin(field_of: Callable[..., Field]) -> None:
    server = OwnRedis()
    try:
        job = field_of(server.url)
        trainer = Trainer(job.environ(), job.folder / "trainer.log")
        try:
            wait_until(job.versions, 30, "the first version")
            server.kill()
            assert busy(trainer.pid, 2.0) < BUSY
            server.start()
        finally:
            trainer.kill()
        job.lease_runs_out()
        assert live(job).verdict.clean
    finally:
        server.remove()


class Poisoned(Worker):
    """Cannot sample the groups of `job.poison`, as a prompt that fits no context cannot be."""

    poison: frozenset[int] = frozenset()

    def turn(self, version: VersionId) -> None:
        for held in tuple(self.intake.held.values()):
            self._refuse(held)
        super().turn(version)

    def post(self, held: list[Held]) -> None:  # type: ignore[override]
        for one in held:
            self._refuse(one)
        super().post([one for one in held if one.item.group not in self.poison])

    def _refuse(self, held: Held) -> None:
        if held.item.group in self.poison and held.item.trajectory in self.intake.held:
            self.intake.fail(held.item.trajectory, "the prompt fits no context")


@pytest.mark.parametrize("poison", [{0}, {0, 1, 2, 3}, {5, 6}, {2, 4, 6, 8, 10}])
def test_poison_prompts_in_any_position_cost_themselves_alone(
    field_of: Callable[..., Field], poison: set[int]
) -> None:
    job = field_of()
    workers = [Poisoned(job, "w0"), Poisoned(job, "w1")]
    for worker in workers:
        worker.poison = frozenset(poison)
    job.workers = [*workers]
    story = live(job)
    assert story.verdict.clean, story.verdict
    size = job.spec.batch.group_size
    there = poison & job.submitted
    assert len(story.verdict.reported) == size * len(there)


def test_a_fast_rollout_goes_no_further_than_its_credits_while_the_trainer_is_dead(
    field_of: Callable[..., Field],
) -> None:
    job = field_of(schedule={"updates": 8, "max_lag": 1})
    trainer = Trainer(job.environ(), job.folder / "trainer.log", ("after segment", 3))
    job.until(lambda: trainer.ended, 60, "the trainer's death")
    job.lease_runs_out()
    for _ in range(200):
        job.turn()
    credits = (job.spec.schedule.max_lag + 1) * job.spec.batch.groups
    assert job.ledger.open_groups() <= credits
    story = live(job)  # the verdict includes the bound, for each trained trajectory
    assert story.verdict.clean, (story.verdict, tail(job.folder / "trainer.log"))
    assert story.verdict.reported == []

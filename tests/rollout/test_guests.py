"""An evaluation's work on a worker: within its share, under its version alone, and gone when it is over."""

from __future__ import annotations

from typing import Any

from waiting import wait_until

from syncline.contract.evaluation import Guest
from syncline.contract.events import WorkItem
from syncline.contract.streams import GROUP_ROLLOUT, GUEST, WORK
from syncline.contract.token_path import trajectory_id
from syncline.contract.version_path import VersionId
from syncline.rollout.guests import Guests
from syncline.rollout.intake import Held, Intake
from syncline.runtime.bus import Bus, pack
from syncline.runtime.ledger import Ledger

PINNED, DIGEST, SLOTS = VersionId(0, 4), "d" * 64, 3


class Place:
    """A worker's guests, and an evaluation of 8 groups of 2 that is its job's guest."""

    def __init__(self, redis_url: str, job: str) -> None:
        self.bus, self.job, self.evaluation = Bus(redis_url), job, f"{job}e"
        self.ledger = Ledger(
            self.bus, self.evaluation, batch_groups=8, max_lag=0, policy="wait", max_attempts=5
        )
        self.bus.ensure_group(WORK.at(self.evaluation), GROUP_ROLLOUT)
        for group in range(8):
            items = [
                WorkItem(
                    job=self.evaluation,
                    trajectory=trajectory_id(self.evaluation, group, i),
                    group=group,
                    index=i,
                    prompt=group,
                    traceparent="",
                    submitted_at=0.0,
                )
                for i in range(2)
            ]
            assert self.ledger.submit(items, 2)
        self.begun: list[str] = []
        self.intake = Intake(self.bus, self.ledger, self.evaluation, "w0", 30.0)
        self.guests = Guests(self.bus, job, self.opened)

    def opened(self, evaluation: str, groups: int) -> tuple[Intake, Any]:
        assert (evaluation, groups) == (self.evaluation, 8)
        return self.intake, None

    def invite(self) -> None:
        guest = Guest(job=self.evaluation, version=PINNED, digest=DIGEST, groups=8, slots=SLOTS)
        self.bus.set(GUEST.at(self.job), pack(guest))

    def submit(self, held: Held) -> None:
        self.begun.append(held.item.trajectory)

    def take(
        self, version: VersionId = PINNED, room: int = 16, alone: bool = False, digest: str = DIGEST
    ) -> int:
        """Look until the evaluation is known, then take once more; how many have begun in all."""
        wait_until(lambda: self.guests.look() == [] and self.guests._now is not None, 5, "the guest is seen")
        self.guests.take((version, digest), room, alone, self.submit)
        return len(self.begun)


def test_no_more_is_begun_than_the_share_while_the_job_has_work(redis_url: str, job: str) -> None:
    place = Place(redis_url, job)
    place.invite()
    assert place.take() == SLOTS
    assert place.take() == SLOTS, "what runs counts"
    place.intake.drop(place.begun[0])
    wait_until(lambda: place.take() == SLOTS + 1, 5, "one that ended makes room for another")
    assert place.take(room=0, alone=True) == SLOTS + 1
    wait_until(lambda: place.take(alone=True) == 16, 5, "a worker without other work gives all its room")


def test_nothing_is_begun_under_another_version(redis_url: str, job: str) -> None:
    place = Place(redis_url, job)
    place.invite()
    assert place.take(version=VersionId(0, 5), alone=True) == 0
    assert place.take(version=VersionId(0, 3), alone=True) == 0
    assert place.take(digest="e" * 64, alone=True) == 0
    assert place.take(alone=True) == 16


def test_when_it_is_over_only_what_was_begun_is_held(redis_url: str, job: str) -> None:
    place = Place(redis_url, job)
    place.invite()
    assert place.take() == SLOTS
    place.bus.delete(GUEST.at(job))
    wait_until(lambda: place.guests.look() == [] and place.guests._now is None, 5, "the guest has left")
    assert set(place.intake.held) == set(place.begun)
    assert place.guests.of(place.begun[0]) is not None
    place.guests.take((PINNED, DIGEST), 16, True, place.submit)
    assert len(place.begun) == SLOTS
    for trajectory in place.begun:
        place.intake.drop(trajectory)
    wait_until(lambda: place.guests.look() == [] and place.guests.of(place.begun[0]) is None, 5, "forgotten")

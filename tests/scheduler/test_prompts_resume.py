"""A scheduler that is killed in the middle of an epoch: its successor draws each prompt exactly as it would have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from installation import Installation
from peers import record

from syncline.contract.job import JobSpec
from syncline.contract.streams import LOCK, OUTCOMES, RATES
from syncline.contract.token_path import Reward, trajectory_id
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus
from syncline.runtime.errands import Errands
from syncline.runtime.ledger import Ledger
from syncline.scheduler.feed import Feeder
from syncline.scheduler.machine import begin
from syncline.scheduler.prompts import Drawn, Sequences
from syncline.scheduler.saved import SERVICE, Saved, Watch, load, save
from syncline.scheduler.sources import sources

UPDATES, BATCH = 14, 2
A, B = 10, 6  # items of the two data sets
SPEC: dict[str, Any] = {
    "task": {
        "environment": "mix",
        "parts": [
            {"environment": "reasoning_gym", "weight": 2, "options": {"dataset": "chain_sum", "size": A}},
            {"environment": "characters", "first": 4, "last": 3 + B},
        ],
    },
    "prompts": {"order": "shuffled", "zero_variance": "filter"},
}


@pytest.fixture
def installation(redis_url: str, tmp_path: Any) -> Iterator[Installation]:
    made = Installation(redis_url, tmp_path)
    made.start()
    yield made
    made.end_jobs()
    made.stop()


def prompts(bus: Bus, job: str) -> dict[int, int]:
    """Group -> prompt, as the ledger recorded it."""
    ledger = Ledger(bus, job, batch_groups=BATCH, max_lag=1, policy="wait", max_attempts=5)
    groups = ledger.counts()["submitted"] // 2
    lines = ledger.entries(trajectory_id(job, group, 0) for group in range(groups)).values()
    found = {line.group: line.prompt for line in lines}
    assert sorted(found) == list(range(groups))
    return found


def test_kills_in_the_middle_of_an_epoch_change_no_draw(installation: Installation, job: str) -> None:
    """Two data sets over several epochs, a third of the prompts barren: an uninterrupted run, and one killed thrice."""
    whole, torn = job, job + "b"
    installation.submit(whole, name="dull", spec=SPEC, updates=UPDATES, mode="disjoint")
    assert installation.ended(whole) == "succeeded", installation.field(whole, "reason")
    installation.submit(torn, name="dull", spec=SPEC, updates=UPDATES, mode="disjoint")
    for update in (1, 5, 9):
        installation.reached(torn, update)
        installation.replace()
    assert installation.ended(torn) == "succeeded", installation.field(torn, "reason")
    drawn = prompts(installation.bus, whole)
    assert prompts(installation.bus, torn) == drawn
    spec = JobSpec.model_validate({"name": "dull", "model": {"name": "none"}, **SPEC}, strict=False)
    sequence = Sequences(sources(spec), spec.prompts, spec.seeds.data)
    state = sequence.begin(0)
    assert list(drawn.values()) == [sequence.next(state, group, {}).prompt for group in range(len(drawn))]
    own = [prompt // 2 % A for prompt in drawn.values() if prompt % 2 == 0]
    for start in range(0, len(own) - A + 1, A):
        assert sorted(own[start : start + A]) == list(range(A))
    assert len(own) > A, "more than one epoch was drawn"
    for name in (whole, torn):
        full(installation, name, drawn)


def full(installation: Installation, job: str, drawn: dict[int, int]) -> None:
    """Every batch was full, every barren group was replaced, and the counts say so."""
    ledger = Ledger(installation.bus, job, batch_groups=BATCH, max_lag=1, policy="wait", max_attempts=5)
    barren = {group for group, prompt in drawn.items() if prompt % 3 == 0}
    lines = ledger.entries(trajectory_id(job, group, 0) for group in drawn).values()
    assert {line.group for line in lines if line.state == "filtered"} == barren
    updates = Counter(line.update for line in lines if line.state == "trained")
    assert updates == dict.fromkeys(range(1, UPDATES + 1), BATCH)
    assert installation.field(job, "violations") == ""
    told = json.loads(installation.field(job, "prompts"))["sources"]
    assert [source["name"] for source in told] == ["reasoning_gym", "characters"]
    assert sum(source["drawn"] for source in told) == len(drawn)
    assert sum(source["trained"] for source in told) == UPDATES * BATCH
    assert sum(source["filtered"].get("all 0", 0) for source in told) == len(barren)
    assert all(0 < source["reward"] < 0.5 and source["open"] == 0 for source in told), told
    assert installation.bus.length(OUTCOMES.at(job)) <= 1, "outcomes are dropped once they are saved"


class Life:
    """The scheduler's part in drawing, on a real Redis: as many lives as asked for, each from what is saved."""

    def __init__(self, url: str, job: str, spec: JobSpec) -> None:
        self.bus, self.job, self.spec, self.errands = Bus(url), job, spec, Errands(url)
        self.ledger = Ledger(self.bus, job, batch_groups=2, max_lag=1, policy="wait", max_attempts=5)
        self.bus.set(LOCK.at(SERVICE), "holder", ttl=600)
        self.born()

    def born(self) -> None:
        state, _ = begin(4, ("w0",), "disjoint")
        self.saved = load(self.bus, self.job) or Saved(state=state, watch=Watch())
        self.feeder = Feeder(self.job, self.spec, self.ledger, self.errands, self.bus)
        self.feeder.submit(self.saved.watch)

    def turn(self, dies: str) -> None:
        self.feeder.note(self.saved.watch)
        self.feeder.draw(self.saved.watch, 3)
        if dies == "before the save":
            return self.born()
        save(self.bus, "holder", self.job, self.saved, rates=self.feeder.unsaved)
        if dies == "before it forgets":
            return self.born()
        self.feeder.saved(self.saved.watch)
        if dies == "before the submission":
            return self.born()
        self.feeder.submit(self.saved.watch)
        return self.born() if dies == "after the submission" else None

    def fail(self, group: int) -> None:
        """The group is submitted, and every member of it fails."""
        for index in range(self.spec.batch.group_size):
            assert self.ledger.end(trajectory_id(self.job, group, index), "failed", "lost")

    def master(self, group: int) -> None:
        """Every member of the group is right, so that the group is filtered and its item measured."""
        for index in range(self.spec.batch.group_size):
            item = self.feeder.item(group, index, 0)
            assert self.ledger.begin(item.trajectory, 1, "w0", V0) == "go"
            self.ledger.publish(record(item, 1, V0, "w0"), "0-1")
            reward = Reward(trajectory=item.trajectory, attempt=1, state="scored", value=1.0)
            assert self.ledger.reward(reward)


V0 = VersionId(0, 0)
DEATHS = ("before the save", "before it forgets", "before the submission", "after the submission")


def test_a_death_between_any_two_steps_changes_no_draw(redis_url: str, job: str) -> None:
    """Groups fail or are mastered, so that prompts come again or rest; the real ledger, the real memory."""
    keys = {"order": "shuffled", "last": 6, "retries": 1, "easiest": 0.9, "zero_variance": "filter"}
    raw = {"name": "n", "model": {"name": "m"}, "batch": {"groups": 2, "group_size": 2}, "prompts": keys}
    spec = JobSpec.model_validate(raw)
    lives = Life(redis_url, job + "a", spec), Life(redis_url, job + "b", spec)
    for number, dies in enumerate((*DEATHS, *DEATHS)):
        for life in lives:
            life.turn(dies if life is lives[1] else "")
            if dies == "before the save" and life is lives[1]:
                life.turn("")
            life.fail(3 * number + 1)
            life.master(3 * number + 2)
    lived, died = (prompts(life.bus, life.job) for life in lives)
    assert died == lived
    assert Counter(lived.values())[lived[1]] > 1, "a prompt was drawn again"
    states = [life.saved.watch.prompts or Drawn() for life in lives]
    assert msgspec.structs.replace(states[0], cursor="") == msgspec.structs.replace(states[1], cursor="")
    rates = [life.bus.hgetall(RATES.at(life.job)) for life in lives]
    assert rates[0] == rates[1] != {}
    assert states[0].tallies[0].rested > 0, "an item that was mastered was passed over"
    for life in lives:
        life.errands.close()

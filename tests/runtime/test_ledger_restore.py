"""What a segment on disk decided is written into a ledger that has forgotten it, and nothing else changes."""

from __future__ import annotations

import pytest
from records import record

from syncline.contract.events import WorkItem
from syncline.contract.token_path import Reward, trajectory_id
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus
from syncline.runtime.ledger import Decided, Ledger, LedgerBroken

V0 = VersionId(0, 0)


def ledger_of(bus: Bus, job: str) -> Ledger:
    return Ledger(bus, job, batch_groups=1, max_lag=1, policy="wait", max_attempts=3)


def decided(index: int, state: str = "trained", reason: str = "") -> Decided:
    return Decided(index=index, prompt=7, state=state, reason=reason, attempt=2, version=V0, tokens=5)  # type: ignore[arg-type]


def submit(ledger: Ledger, group: int) -> None:
    items = [
        WorkItem(
            job=ledger.job,
            trajectory=trajectory_id(ledger.job, group, index),
            group=group,
            index=index,
            prompt=7,
            traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01",
            submitted_at=1.0,
        )
        for index in range(2)
    ]
    assert ledger.submit(items, 2)


def sums(ledger: Ledger) -> dict[str, int]:
    counts = ledger.counts()
    assert ledger.sample(0.0).holds
    assert ledger.recount() == {name: counts[name] for name in ledger.recount()}
    return {name: value for name, value in counts.items() if value}


def test_an_empty_ledger_takes_all_of_it_once(redis_url: str, job: str) -> None:
    bus = Bus(redis_url)
    ledger = ledger_of(bus, job)
    members = [decided(0), decided(1, "filtered", "unscored")]
    assert ledger.restore(1, 0, 4, 2, members) == 2
    assert ledger.restore(1, 0, 4, 2, members) == 0
    assert sums(ledger) == {"submitted": 2, "trained": 1, "filtered": 1}
    assert ledger.claimed_version() == 0
    line = ledger.entry(trajectory_id(job, 4, 0))
    assert line is not None
    assert (line.state, line.update, line.prompt) == ("trained", 1, 7)
    assert [outcome.how for _, outcome in ledger.outcomes("0", 10)] == ["trained"]
    bus.close()


def test_open_members_end_as_the_segment_says_and_their_work_goes(redis_url: str, job: str) -> None:
    bus = Bus(redis_url)
    ledger = ledger_of(bus, job)
    submit(ledger, 0)
    first = trajectory_id(job, 0, 0)
    assert ledger.begin(first, 1, "w0", V0) == "go"
    assert ledger.restore(1, 0, 0, 2, [decided(0)]) == 2
    assert sums(ledger) == {"submitted": 2, "trained": 1, "failed": 1}
    assert ledger.open_groups() == 0
    assert ledger.lost_work() == []
    assert ledger.publish(record(second(job), 1, V0), "0-1") == "fenced"
    bus.close()


def second(job: str) -> str:
    return trajectory_id(job, 0, 1)


def test_a_claimed_group_is_not_touched(redis_url: str, job: str) -> None:
    bus = Bus(redis_url)
    ledger = ledger_of(bus, job)
    submit(ledger, 0)
    for index in range(2):
        name = trajectory_id(job, 0, index)
        assert ledger.begin(name, 1, "w0", V0) == "go"
        if index:
            ledger.end(name, "failed", "x")
    entry = ledger.entry(trajectory_id(job, 0, 0))
    assert entry is not None
    assert ledger.publish(record(entry.trajectory, 1, V0), entry.work_id or "") == "published"
    reward(ledger, entry.trajectory)
    assert ledger.claim(1, 0) is not None
    with pytest.raises(LedgerBroken, match="claimed for update 1"):
        ledger.restore(1, 0, 0, 2, [decided(0)])
    bus.close()


def reward(ledger: Ledger, trajectory: str) -> None:
    assert ledger.reward(
        Reward(
            trajectory=trajectory, attempt=1, state="scored", value=1.0, reason="", judge="t/1", seconds=0.1
        )
    )

"""Several at once are as one after another: begin_many, publish_many, reward_many against begin, publish, reward."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records import items, record, scored

from syncline.contract.streams import COUNTS, GROUP_ROLLOUT, TRAJECTORIES, WORK
from syncline.contract.token_path import trajectory_id
from syncline.contract.trajectory_wire import decode
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus
from syncline.runtime.ledger import Demand, Ledger, Policy, StampMismatch

GROUPS, SIZE = 3, 2
V0, V1 = VersionId(0, 0), VersionId(0, 1)

_MEMBERS = st.tuples(st.integers(0, GROUPS), st.integers(0, SIZE - 1), st.sampled_from([1, 1, 1, 2]))
_CALLS = st.lists(
    st.tuples(st.sampled_from(["w0", "w1"]), st.integers(0, 3), st.lists(_MEMBERS, min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
)


@pytest.fixture
def bus(redis_url: str) -> Bus:
    return Bus(redis_url)


def submitted(bus: Bus, policy: Policy, job: str = "", demand: Demand = "") -> Ledger:
    ledger = Ledger(
        bus, job or "j" + secrets.token_hex(5), batch_groups=1, max_lag=1, policy=policy, max_attempts=3
    )
    for group in range(GROUPS):
        assert ledger.submit(items(ledger.job, group, SIZE), SIZE, demand)
    return ledger


def shown(ledger: Ledger) -> object:
    """All that a beginning changes, without what is another job's by nature."""
    lines = ledger.entries(
        trajectory_id(ledger.job, g, i) for g in range(GROUPS) for i in range(SIZE)
    ).values()
    told = [
        (line.group, line.index, line.state, line.attempt, line.worker, line.version, line.reward)
        for line in lines
    ]
    return told, ledger.groups(), ledger._bus.hgetall(COUNTS.at(ledger.job))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(policy=st.sampled_from(["wait", "expire", "mask_old_tokens"]), calls=_CALLS)
def test_many_begin_as_one_after_another(
    bus: Bus, policy: Policy, calls: list[tuple[str, int, list[tuple[int, int, int]]]]
) -> None:
    alone, together = submitted(bus, policy), submitted(bus, policy)
    for worker, number, members in calls:
        version = VersionId(number // 2, number)
        one_by_one = [
            alone.begin(trajectory_id(alone.job, group, index), attempt, worker, version)
            for group, index, attempt in members
        ]
        asked = [(trajectory_id(together.job, group, index), attempt) for group, index, attempt in members]
        assert together.begin_many(asked, worker, version) == one_by_one
        assert shown(together) == shown(alone)


_REWARDS = st.lists(
    st.tuples(
        st.integers(0, GROUPS),
        st.integers(0, SIZE - 1),
        st.sampled_from([1, 1, 1, 2]),
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=10,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    demand=st.sampled_from(["", "signal"]),
    buffered=st.integers(1, GROUPS * SIZE),
    calls=st.lists(_REWARDS, max_size=3),
)
def test_many_are_rewarded_as_one_after_another(
    bus: Bus, demand: Demand, buffered: int, calls: list[list[tuple[int, int, int, float]]]
) -> None:
    """Some twice, some of another attempt, some not published and some unknown."""
    alone, together = submitted(bus, "expire", demand=demand), submitted(bus, "expire", demand=demand)
    for ledger in (alone, together):
        names = [trajectory_id(ledger.job, n % GROUPS, n // GROUPS) for n in range(buffered)]
        assert set(ledger.begin_many([(name, 1) for name in names], "w0", V0)) == {"go"}
        assert set(ledger.publish_many([(record(name, 1, V0), "0-1") for name in names])) == {"published"}
    for call in calls:
        told = [
            [
                scored(trajectory_id(ledger.job, group, index), attempt, value)
                for group, index, attempt, value in call
            ]
            for ledger in (alone, together)
        ]
        assert together.reward_many(told[1]) == [alone.reward(one) for one in told[0]]
        assert shown(together) == shown(alone)
        assert together.ready_groups() == alone.ready_groups()
        ended = [[outcome for _, outcome in ledger.outcomes("0", 100)] for ledger in (alone, together)]
        assert ended[0] == ended[1]


def test_a_repeated_call_begins_nothing_twice(bus: Bus) -> None:
    ledger = submitted(bus, "wait")
    asked = [(trajectory_id(ledger.job, 0, index), 1) for index in range(SIZE)]
    assert ledger.begin_many(asked, "w0", V0) == ["go", "go"]
    before = shown(ledger)
    assert ledger.begin_many(asked, "w0", V0) == ["go", "go"]
    assert shown(ledger) == before
    assert ledger.begin_many([], "w0", V0) == []


def test_many_are_published_over_several_transactions_and_each_is_told(bus: Bus, job: str) -> None:
    """A fenced one, one under another version and one that is published already stand among 200."""
    size, stale, wrong, again = 200, 3, 130, 7
    ledger = Ledger(bus, job, batch_groups=1, max_lag=1, policy="wait", max_attempts=3)
    assert ledger.submit(items(job, 0, size), size)
    work = bus.group_read(WORK.at(job), GROUP_ROLLOUT, "w0", size, None)
    names = [trajectory_id(job, 0, index) for index in range(size)]
    assert set(ledger.begin_many([(name, 1) for name in names], "w0", V0)) == {"go"}
    records = [record(name, 1, V0, sampled=1 + index % 5) for index, name in enumerate(names)]
    records[stale] = record(names[stale], 2, V0)
    records[wrong] = record(names[wrong], 1, V1)
    assert ledger.publish(records[again], work[again].id) == "published"

    told = list(zip(records, (entry.id for entry in work), strict=True))
    with pytest.raises(StampMismatch, match=rf"{names[wrong]} .*oldest span says version 0\.1.*under 0\.0"):
        ledger.publish_many(told)
    right = [pair for index, pair in enumerate(told) if index != wrong]
    for _ in range(2):  # a reply may have been lost
        answers = ledger.publish_many(right)
        assert [index for index, answer in enumerate(answers) if answer != "published"] == [stale]

    kept = {name: record for name, record in zip(names, records, strict=True)}
    del kept[names[stale]], kept[names[wrong]]
    stored = {entry.id: decode(entry.fields) for entry in bus.range(TRAJECTORIES.at(job))}
    lines = ledger.entries(kept)
    assert len(stored) == len(kept) == bus.length(TRAJECTORIES.at(job))
    assert {name: stored[line.stream_id or ""] for name, line in lines.items()} == kept
    assert {name: line.tokens for name, line in lines.items()} == {n: r.sampled for n, r in kept.items()}
    left = {work[stale].id, work[wrong].id}
    assert {entry.id for entry in bus.group_pending(WORK.at(job), GROUP_ROLLOUT, "w0")} == left
    assert ledger.counts()["buffered"] == len(kept)

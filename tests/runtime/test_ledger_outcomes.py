"""Groups that teach nothing end before they can be claimed, and each group's end is told once, in order."""

from __future__ import annotations

import msgspec
import pytest
from records import items, record, scored

from syncline.contract.streams import REWARDS, TRAJECTORIES
from syncline.contract.token_path import Reward
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus
from syncline.runtime.ledger import Demand, Ledger
from syncline.runtime.ledger_shapes import Outcome

V0 = VersionId(0, 0)


@pytest.fixture
def ledger(redis_url: str, job: str) -> Ledger:
    return Ledger(Bus(redis_url), job, batch_groups=1, max_lag=1, policy="wait", max_attempts=1)


def sample(ledger: Ledger, group: int, values: list[float | None], demand: Demand = "signal") -> list[str]:
    """Submit a group, publish it whole, and reward it; None: unscored."""
    names = [item.trajectory for item in items(ledger.job, group, len(values))]
    assert ledger.submit(items(ledger.job, group, len(values)), len(values), demand)
    for name, value in zip(names, values, strict=True):
        assert ledger.begin(name, 1, "w0", V0) == "go"
        assert ledger.publish(record(name, 1, V0), "0-1") == "published"
        reward = (
            scored(name, 1, value)
            if value is not None
            else Reward(trajectory=name, attempt=1, state="unscored", value=None)
        )
        assert ledger.reward(reward)
    return names


def told(ledger: Ledger) -> list[Outcome]:
    return [outcome for _, outcome in ledger.outcomes("0", 100)]


@pytest.mark.parametrize(
    ("values", "demand", "why"),
    [
        ([0.0, 0.0, 0.0], "signal", "all rewards are 0"),
        ([1.0, 1.0, 1.0], "signal", "all rewards are 1"),
        ([0.3, 0.3, None], "signal", "all rewards are 0.3"),
        ([0.3, None, None], "signal", "fewer than two scored members"),
        ([None, None, None], "signal", "fewer than two scored members"),
        ([0.3, 0.4, None], "whole", "incomplete"),
    ],
)
def test_a_group_without_a_signal_is_filtered_before_the_claim(
    redis_url: str, ledger: Ledger, values: list[float | None], demand: Demand, why: str
) -> None:
    names = sample(ledger, 4, values, demand)
    assert (ledger.open_groups(), ledger.ready_groups()) == (0, 0)
    assert {(entry.state, entry.reason) for entry in ledger.entries(names).values()} == {("filtered", why)}
    assert ledger.claim(1, 0) is None
    sums = ledger.counts()
    assert (sums["submitted"], sums["filtered"], sums["buffered"], sums["groups_lost"]) == (3, 3, 0, 1)
    assert ledger.sample(0.0).holds
    (outcome,) = told(ledger)
    found = [value for value in values if value is not None]
    assert (outcome.group, outcome.prompt, outcome.how, outcome.reason) == (4, 4, "filtered", why)
    assert outcome.scored == len(found)
    assert outcome.mean == pytest.approx(sum(found) / len(found) if found else 0.0)
    bus = Bus(redis_url)
    assert bus.length(TRAJECTORIES.at(ledger.job)) == 0
    assert bus.hgetall(REWARDS.at(ledger.job)) == {}


@pytest.mark.parametrize(
    ("values", "demand"),
    [
        ([0.0, 1.0, 0.0], "signal"),
        ([0.0, 1e-9, None], "signal"),
        ([0.0, 0.5, 1.0], "whole"),
        ([0.0, 0.0, 0.0], ""),
        ([None, None, None], ""),
    ],
)
def test_a_group_that_offers_what_is_asked_can_be_claimed(
    ledger: Ledger, values: list[float | None], demand: Demand
) -> None:
    names = sample(ledger, 0, values, demand)
    claim = ledger.claim(1, 0)
    assert claim is not None
    assert claim.trajectories == tuple(names)
    assert told(ledger) == []
    ledger.trained(1, names)
    ledger.trained(1, names)
    (outcome,) = told(ledger)
    found = [value for value in values if value is not None]
    assert (outcome.how, outcome.scored) == ("trained", len(found))
    assert (outcome.low, outcome.high) == ((min(found), max(found)) if found else (0.0, 0.0))


def test_a_reward_counts_however_its_fields_lie_and_an_unreadable_one_does_not(
    redis_url: str, ledger: Ledger
) -> None:
    names = sample(ledger, 0, [0.25, 0.5, 0.75, 1.0])
    assert ledger.claim(1, 0) is not None
    bus, key = Bus(redis_url), REWARDS.at(ledger.job)
    whole = [msgspec.msgpack.decode(raw) for raw in bus.hmget(key, names) if raw]
    other_order = dict(reversed(whole[0].items()))
    unknown_field = {"later": [1, 2], **whole[1]}
    for name, stored in (
        (names[0], msgspec.msgpack.encode(other_order)),
        (names[1], msgspec.msgpack.encode(unknown_field)),
        (names[2], msgspec.msgpack.encode(whole[2])[:-3]),
    ):
        bus.call("HSET", key, name, stored)
    ledger.trained(1, names)
    (outcome,) = told(ledger)
    assert (outcome.scored, outcome.low, outcome.high) == (3, 0.25, 1.0)
    assert outcome.mean == pytest.approx((0.25 + 0.5 + 1.0) / 3)


def test_the_last_member_s_failure_completes_a_group_too(ledger: Ledger) -> None:
    """Two equal rewards are there; the third member fails, and what is left is no signal."""
    names = [item.trajectory for item in items(ledger.job, 0, 3)]
    ledger.submit(items(ledger.job, 0, 3), 3, "signal")
    for name in names[:2]:
        ledger.begin(name, 1, "w0", V0)
        ledger.publish(record(name, 1, V0), "0-1")
        ledger.reward(scored(name, 1, 0.5))
    assert ledger.retry(names[2], "0-1", "its worker is gone") is None
    states = [entry.state for entry in ledger.entries(names).values()]
    assert states == ["filtered", "filtered", "failed"]
    assert [outcome.how for outcome in told(ledger)] == ["filtered"]


def test_each_end_is_told_once_and_in_order(ledger: Ledger) -> None:
    trained = sample(ledger, 0, [0.0, 1.0])
    sample(ledger, 1, [1.0, 1.0])
    for group, states in ((2, ("failed", "expired")), (3, ("expired", "filtered"))):
        ledger.submit(items(ledger.job, group, 2), 2, "signal")
        for item, state in zip(items(ledger.job, group, 2), states, strict=True):
            for _ in range(2):
                ledger.end(item.trajectory, "failed" if state == "failed" else "expired", state)
    assert ledger.claim(1, 0) is not None
    ledger.trained(1, trained)
    ends = [(outcome.group, outcome.how) for outcome in told(ledger)]
    assert ends == [(1, "filtered"), (2, "failed"), (3, "expired"), (0, "trained")]


def test_outcomes_are_read_from_a_cursor_and_dropped_behind_it(ledger: Ledger) -> None:
    for group in range(5):
        sample(ledger, group, [0.0, 0.0])
    page = ledger.outcomes("0", 3)
    assert [outcome.group for _, outcome in page] == [0, 1, 2]
    cursor = page[-1][0]
    ledger.drop_outcomes(cursor)
    assert [outcome.group for _, outcome in ledger.outcomes(cursor, 10)] == [3, 4]
    assert [outcome.group for outcome in told(ledger)] == [2, 3, 4]

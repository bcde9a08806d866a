"""The ledger's transitions one by one, on a real server."""

from __future__ import annotations

import functools
import math
import threading

import msgspec
import pytest
from records import items, record, scored
from server import own_server
from waiting import wait_until

from syncline.contract.streams import DEAD, GROUP_ROLLOUT, HELD, REWARDS, TRAJECTORIES, WORK
from syncline.contract.token_path import Reward, trajectory_id
from syncline.contract.trajectory_wire import decode
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus, BusDown
from syncline.runtime.ledger import (
    LagBroken,
    Ledger,
    LedgerBroken,
    Policy,
    StampMismatch,
    UnknownTrajectory,
)

NEVER_WAIT: tuple[Policy, ...] = ("expire", "mask_old_tokens")
V0, V1, V2 = VersionId(0, 0), VersionId(0, 1), VersionId(0, 2)


@pytest.fixture
def bus(redis_url: str) -> Bus:
    return Bus(redis_url)


def ledger_of(
    bus: Bus, job: str, *, batch: int = 1, lag: int = 1, policy: Policy = "wait", tries: int = 2
) -> Ledger:
    return Ledger(bus, job, batch_groups=batch, max_lag=lag, policy=policy, max_attempts=tries)


def take(bus: Bus, job: str, count: int = 100) -> dict[str, str]:
    """Work items now taken by w0: trajectory -> stream id, in order of submission."""
    taken = bus.group_read(WORK.at(job), GROUP_ROLLOUT, "w0", count, None)
    return {trajectory_id(job, i // 2, i % 2): entry.id for i, entry in enumerate(taken)}


def ready(ledger: Ledger, group: int, version: VersionId = V0, size: int = 2) -> list[str]:
    """Submit a group and bring it into `ready`."""
    names = [item.trajectory for item in items(ledger.job, group, size)]
    assert ledger.submit(items(ledger.job, group, size), size)
    for name in names:
        assert ledger.begin(name, 1, "w0", version) == "go"
        assert ledger.publish(record(name, 1, version), "0-1") == "published"
        assert ledger.reward(scored(name))
    return names


def holds(ledger: Ledger) -> dict[str, int]:
    """The sums, after checking them against the lines."""
    sums = ledger.counts()
    assert ledger.sample(1.0).holds
    assert ledger.recount() == {name: sums[name] for name in ledger.recount()}
    return {name: value for name, value in sums.items() if value}


def test_a_trajectory_from_submission_to_forgotten(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    assert ledger.submit(items(job, 0, 2), 2)
    assert not ledger.submit(items(job, 0, 2), 2)
    work = take(bus, job)
    first, second = work
    for name, item in work.items():
        assert ledger.begin(name, ledger.attempt(name), "w0", V0) == "go"
        assert ledger.publish(record(name, 1, V0), item) == "published"
    assert bus.length(WORK.at(job)) == 0
    assert bus.group_pending(WORK.at(job), GROUP_ROLLOUT, "w0") == []
    assert ledger.claim(1, 0) is None
    assert ledger.reward(scored(first))
    assert ledger.claim(1, 0) is None
    assert ledger.reward(scored(second))
    assert ledger.ready_groups() == 1
    claim = ledger.claim(1, 0)
    assert claim is not None
    assert claim.trajectories == (first, second)
    assert claim.groups[0].missing == ()
    assert holds(ledger) == {"submitted": 2, "buffered": 2, "claimed": 1}
    ledger.trained(1, claim.trajectories)
    assert holds(ledger) == {"submitted": 2, "trained": 2}
    assert ledger.open_groups() == 0
    entry = ledger.entry(first)
    assert entry is not None
    assert (entry.state, entry.update, entry.version, entry.worker) == ("trained", 1, V0, "w0")
    [stored] = bus.range(TRAJECTORIES.at(job), entry.stream_id or "-", entry.stream_id or "+")
    assert decode(stored.fields) == record(first, 1, V0)
    ledger.forget(claim.trajectories)
    ledger.forget(claim.trajectories)
    assert bus.length(TRAJECTORIES.at(job)) == 0
    assert bus.hlen(REWARDS.at(job)) == 0
    left = ledger.entry(first)
    assert left is not None
    assert left.state == "trained"
    assert left.stream_id is None


def test_every_call_may_be_repeated(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    [a, b] = ready(ledger, 0)
    assert ledger.publish(record(a, 1, V0), "0-1") == "published"
    assert not ledger.reward(scored(a, value=0.0))
    claim = ledger.claim(1, 0)
    assert ledger.claim(1, 0) == claim
    assert bus.length(TRAJECTORIES.at(job)) == 2
    ledger.trained(1, [a, b])
    ledger.trained(1, [a, b])
    assert ledger.publish(record(a, 1, V0), "0-1") == "published"
    assert holds(ledger) == {"submitted": 2, "trained": 2, "refused": 1}
    assert bus.hgetall(REWARDS.at(job)).keys() == {a.encode(), b.encode()}


def test_rewards_of_many_are_each_stored_or_refused(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    assert ledger.submit(items(job, 0, 2), 2)
    for name in (a := f"{job}-0-0", b := f"{job}-0-1"):
        assert ledger.begin(name, 1, "w0", V0) == "go"
        assert ledger.publish(record(name, 1, V0), "0-1") == "published"
    assert ledger.reward_many([]) == []
    assert ledger.reward_many([scored(a), scored(b, attempt=2), scored(a), scored(b)]) == [
        True,
        False,
        False,
        True,
    ]
    assert ledger.ready_groups() == 1
    assert holds(ledger)["refused"] == 2


def test_an_older_attempt_is_fenced_everywhere(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    ledger.submit(items(job, 0, 2), 2)
    work = take(bus, job)
    a, b = work
    assert ledger.begin(a, 1, "w0", V0) == "go"
    assert ledger.begin(a, 1, "w1", V0) == "fenced"
    assert ledger.retry(a, work[a], "w0 was silent") == 2
    assert ledger.begin(a, 1, "w0", V0) == "fenced"
    assert ledger.publish(record(a, 1, V0), work[a]) == "fenced"
    assert bus.length(TRAJECTORIES.at(job)) == 0
    assert ledger.begin(a, 2, "w1", V0) == "go"
    assert ledger.publish(record(a, 2, V0, "w1"), work[a]) == "published"
    assert ledger.publish(record(a, 1, V0), work[a]) == "fenced"
    assert not ledger.reward(scored(a, attempt=1))
    assert ledger.reward(scored(a, attempt=2))
    assert ledger.retry(a, work[a], "late") is None
    assert holds(ledger) == {
        "submitted": 2,
        "running": 1,
        "buffered": 1,
        "fenced": 4,
        "refused": 1,
        "retried": 1,
    }
    assert [entry.id for entry in bus.range(WORK.at(job))] == [work[b]]


def test_attempts_run_out_and_the_group_trains_without_the_member(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job, tries=2)
    ledger.submit(items(job, 0, 2), 2)
    work = take(bus, job)
    a, b = work
    ledger.begin(b, 1, "w0", V0)
    ledger.publish(record(b, 1, V0), work[b])
    ledger.reward(scored(b))
    assert ledger.retry(a, work[a], "killed") == 2
    assert ledger.retry(a, work[a], "killed again") is None
    assert bus.length(WORK.at(job)) == 0
    entry = ledger.entry(a)
    assert entry is not None
    assert (entry.state, entry.reason) == ("failed", "killed again")
    [letter] = bus.range(DEAD.at(job))
    assert letter.fields == {b"trajectory": a.encode(), b"attempt": b"2", b"reason": b"killed again"}
    claim = ledger.claim(1, 0)
    assert claim is not None
    assert (claim.groups[0].trajectories, claim.groups[0].missing) == ((b,), (a,))
    with pytest.raises(LedgerBroken, match="not claimed"):
        ledger.trained(1, [a, b])
    ledger.trained(1, [b])
    assert holds(ledger) == {"submitted": 2, "trained": 1, "failed": 1, "retried": 2}


def test_a_group_whose_every_member_ended_leaves_and_is_counted(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    ledger.submit(items(job, 0, 2), 2)
    a, b = take(bus, job)
    ledger.begin(b, 1, "w0", V0)
    ledger.publish(record(b, 1, V0), "0-1")
    assert ledger.end(a, "expired", "job ended")
    assert not ledger.end(a, "failed", "again")
    assert ledger.end(b, "expired", "job ended")
    assert (ledger.open_groups(), ledger.ready_groups()) == (0, 0)
    assert bus.length(TRAJECTORIES.at(job)) == 0
    assert holds(ledger) == {"submitted": 2, "expired": 2, "groups_lost": 1}
    assert ledger.begin(a, 1, "w0", V0) == "fenced"


def test_the_sampler_s_stamp_must_agree_with_the_ledger(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    ledger.submit(items(job, 0, 2), 2)
    a, b = take(bus, job)
    ledger.begin(a, 1, "w0", V1)
    with pytest.raises(StampMismatch, match=r"oldest span says version 0\.0.*begin under 0\.1"):
        ledger.publish(record(a, 1, V0), "0-1")
    assert ledger.publish(record(b, 1, V0), "0-1") == "fenced"  # begun at a server that has forgotten it
    with pytest.raises(StampMismatch, match=r"says version 1\.1"):
        ledger.publish(record(a, 1, VersionId(1, 1)), "0-1")
    assert holds(ledger) == {"submitted": 2, "running": 2, "fenced": 1}


def test_a_retried_member_no_longer_holds_its_group_s_deadline(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job, lag=3)
    ledger.submit(items(job, 0, 2), 2)
    work = take(bus, job)
    a, b = work
    ledger.begin(a, 1, "w0", V0)
    ledger.begin(b, 1, "w1", V2)
    assert ledger.groups()[0].oldest == 0
    assert ledger.retry(a, work[a], "w0 died") == 2
    assert ledger.groups()[0].oldest == 2
    assert ledger.begin(a, 2, "w1", VersionId(0, 4)) == "go"
    assert ledger.groups()[0].oldest == 2
    assert ledger.begin(a, 2, "w1", V1) == "go"
    assert ledger.groups()[0].oldest == 1


def test_begin_waits_until_an_update_can_still_take_the_group(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job, batch=1, lag=1)
    for group in range(3):
        ledger.submit(items(job, group, 2), 2)
    names = [trajectory_id(job, group, 0) for group in range(3)]
    assert ledger.begin(names[0], 1, "w0", V0) == "go"
    assert ledger.begin(names[1], 1, "w0", V0) == "go"
    assert ledger.begin(names[2], 1, "w0", V0) == "wait"
    assert ledger.begin(trajectory_id(job, 0, 1), 1, "w0", V2) == "go"
    assert ledger.begin(names[2], 1, "w0", V1) == "go"
    assert ledger.begin(trajectory_id(job, 2, 1), 1, "slow", V0) == "wait"


@pytest.mark.parametrize("policy", NEVER_WAIT)
def test_the_policies_that_never_wait_refuse_only_what_is_lost_already(
    bus: Bus, job: str, policy: Policy
) -> None:
    ledger = ledger_of(bus, job, batch=1, lag=1, policy=policy)
    ready(ledger, 0)
    for group in (1, 2, 3):
        ledger.submit(items(job, group, 2), 2)
        assert ledger.begin(trajectory_id(job, group, 0), 1, "w0", V0) == "go"
    assert ledger.claim(1, 0) is not None
    ready(ledger, 4, V1)
    assert ledger.claim(2, 1) is not None
    assert ledger.begin(trajectory_id(job, 3, 1), 1, "w0", V0) == "go"
    ledger.submit(items(job, 5, 2), 2)
    assert ledger.begin(trajectory_id(job, 5, 0), 1, "w0", V0) == "wait"
    assert ledger.begin(trajectory_id(job, 5, 0), 1, "w0", V1) == "go"
    assert ledger.overdue(2) == [1, 2, 3]
    assert ledger.overdue(1) == []


def test_expire_never_claims_a_group_over_the_bound_and_masking_does(bus: Bus, job: str) -> None:
    for policy, taken in zip(NEVER_WAIT, (1, 0), strict=True):
        ledger = ledger_of(bus, job + policy[0], batch=1, lag=1, policy=policy)
        ready(ledger, 0, V0)
        ready(ledger, 1, V2)
        claim = ledger.claim(3, 2)
        assert claim is not None
        assert claim.groups[0].group == taken


def test_wait_would_rather_stop_than_train_over_the_bound(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job, batch=1, lag=1)
    ready(ledger, 0, V0)
    with pytest.raises(LagBroken, match=r"group 0 began under version 0, max_lag is 1"):
        ledger.claim(3, 2)
    assert ledger.claim(2, 1) is not None


def test_a_claim_undone_is_ready_again(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job, batch=1, lag=1)
    names = ready(ledger, 0)
    claim = ledger.claim(1, 0)
    assert claim is not None
    assert ledger.claims() == {1: msgspec.structs.replace(claim, records=())}
    assert ledger.claimed_version() == 0
    assert ledger.end(names[0], "filtered", "no advantage")
    assert ledger.unclaim(1)
    assert not ledger.unclaim(1)
    assert ledger.claimed_version() == -1
    again = ledger.claim(1, 0)
    assert again is not None
    assert (again.groups[0].trajectories, again.groups[0].missing) == ((names[1],), (names[0],))
    assert ledger.end(names[1], "filtered", "alone")
    ledger.trained(1, [])
    assert holds(ledger) == {"submitted": 2, "filtered": 2, "groups_lost": 1}


def test_a_claim_hands_out_what_the_ledger_holds_of_its_records(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job, batch=1, lag=1)
    names = ready(ledger, 0)
    claim = ledger.claim(1, 0)
    assert claim is not None
    stored = {entry.id: decode(entry.fields) for entry in bus.range(TRAJECTORIES.at(job))}
    assert [stored[held.stream_id].trajectory for held in claim.records] == list(claim.trajectories) == names
    assert [held.attempt for held in claim.records] == [1, 1]
    assert [held.reward for held in claim.records] == bus.hmget(REWARDS.at(job), names)
    assert ledger.end(names[0], "filtered", "no advantage")
    again = ledger.claim(1, 0)
    assert again is not None
    assert (again.groups, again.records[1]) == (claim.groups, claim.records[1])
    assert again.records[0].stream_id == ""


def test_a_claim_of_a_trajectory_that_has_no_line_is_refused_by_its_name(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job, batch=1, lag=1)
    names = ready(ledger, 0)
    assert ledger.claim(1, 0) is not None
    bus.call("HDEL", HELD.at(job), names[1])
    with pytest.raises(LedgerBroken, match=f"update 1 has claimed {names[1]}, which is not in the ledger"):
        ledger.claim(1, 0)


def test_trained_takes_a_whole_claim_or_nothing(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job, batch=1, lag=1)
    [a, b] = ready(ledger, 0)
    [c, _] = ready(ledger, 1)
    with pytest.raises(LedgerBroken, match="nothing is claimed"):
        ledger.trained(1, [a, b])
    ledger.claim(1, 0)
    for wrong, story in (
        ([a], "neither trained nor ended"),
        ([a, b, c], "not claimed"),
        ([a, b, b], "twice"),
    ):
        with pytest.raises(LedgerBroken, match=story):
            ledger.trained(1, wrong)
    with pytest.raises(LedgerBroken, match="is buffered"):
        ledger.forget([a])
    ledger.trained(1, [a, b])
    ledger.claim(2, 1)
    with pytest.raises(LedgerBroken, match="neither trained nor ended"):
        ledger.trained(2, [a, b])
    with pytest.raises(LedgerBroken, match=r"update 1"):
        ledger.trained(3, [a])
    with pytest.raises(LedgerBroken, match="claimed at version 1, not 7"):
        ledger.claim(2, 7)
    assert holds(ledger) == {"submitted": 4, "buffered": 2, "trained": 2, "claimed": 1}


def test_a_reward_is_finite_or_none(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    scored_none = Reward(trajectory="x", attempt=1, state="scored", value=None)
    scored_nan = Reward(trajectory="x", attempt=1, state="scored", value=math.nan)
    unscored_zero = Reward(trajectory="x", attempt=1, state="unscored", value=0.0)
    for wrong in (scored_none, scored_nan, unscored_zero):
        with pytest.raises(ValueError, match="finite if scored"):
            ledger.reward(wrong)


def test_what_the_ledger_does_not_know(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    name = trajectory_id(job, 9, 0)
    assert ledger.entry(name) is None
    assert ledger.begin(name, 1, "w0", V0) == "fenced"
    assert ledger.publish(record(name, 1, V0), "0-1") == "fenced"
    assert ledger.retry(name, "0-1", "taken over") is None
    assert not ledger.reward(scored(name))
    with pytest.raises(UnknownTrajectory, match=name):
        ledger.end(name, "expired", "x")
    with pytest.raises(UnknownTrajectory, match=name):
        ledger.attempt(name)
    with pytest.raises(ValueError, match="members of one group"):
        ledger.submit(items(job, 0, 3), 2)
    with pytest.raises(ValueError, match="members of one group"):
        ledger.submit([], 2)


def test_unrewarded_names_old_records_without_a_reward(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    ledger.submit(items(job, 0, 2), 2)
    a, b = take(bus, job)
    for name in (a, b):
        ledger.begin(name, 1, "w0", V0)
        ledger.publish(record(name, 1, V0), "0-1")
    ledger.reward(scored(a))
    assert [entry.trajectory for entry in ledger.unrewarded(0.0)] == [b]
    assert ledger.unrewarded(60.0) == []


def test_a_work_item_that_somebody_deleted_is_found_and_put_back(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    ledger.submit(items(job, 0, 2), 2)
    work = take(bus, job)
    a = next(iter(work))
    assert ledger.lost_work() == []
    assert ledger.resubmit(items(job, 0, 2)[0]) is None
    bus.delete_entries(WORK.at(job), [work[a]])
    assert bus.group_pending(WORK.at(job), GROUP_ROLLOUT, "w0").deleted == (work[a],)
    [lost] = ledger.lost_work()
    assert lost.trajectory == a
    assert ledger.resubmit(items(job, 0, 2)[0]) == 2
    assert ledger.lost_work() == []
    assert ledger.attempt(a) == 2
    [entry] = bus.group_read(WORK.at(job), GROUP_ROLLOUT, "w1", 10, None)
    new = ledger.entry(a)
    assert new is not None
    assert new.work_id == entry.id
    assert holds(ledger) == {"submitted": 2, "running": 2, "resubmitted": 1}


def test_a_member_that_ends_before_its_reward_does_not_hold_up_its_group(bus: Bus, job: str) -> None:
    ledger = ledger_of(bus, job)
    ledger.submit(items(job, 0, 2), 2)
    a, b = take(bus, job)
    for name in (a, b):
        ledger.begin(name, 1, "w0", V0)
        ledger.publish(record(name, 1, V0), "0-1")
    assert ledger.end(a, "filtered", "unreadable")
    assert ledger.ready_groups() == 0
    assert ledger.reward(scored(b))
    claim = ledger.claim(1, 0)
    assert claim is not None
    assert (claim.groups[0].trajectories, claim.groups[0].missing) == ((b,), (a,))


def test_beginning_again_under_an_older_version_moves_the_group_and_does_not_count_it_twice(
    bus: Bus, job: str
) -> None:
    ledger = ledger_of(bus, job, batch=1, lag=1)
    for group, version in enumerate((V0, V1, V1)):
        ledger.submit(items(job, group, 2), 2)
        assert ledger.begin(trajectory_id(job, group, 0), 1, "w0", version) == "go"
    assert ledger.begin(trajectory_id(job, 1, 0), 1, "w0", V0) == "go"
    assert [group.oldest for group in ledger.groups().values()] == [0, 0, 1]
    assert ledger.begin(trajectory_id(job, 2, 0), 1, "w0", V0) == "wait"
    assert [group.oldest for group in ledger.groups().values()] == [0, 0, 1]


def test_a_killed_server_leaves_the_ledger_whole(job: str) -> None:
    """Transitions from several threads while the server is killed and restarted: nothing lost, nothing twice.

    `submit` and `reward` may answer False when their first reply was lost; their effect is there all the same.
    """
    with own_server() as server:
        done: list[str] = []
        buses = [Bus(server.url) for _ in range(4)]
        ledgers = [ledger_of(bus, job, batch=1, lag=10_000, policy="mask_old_tokens") for bus in buses]

        failures: list[Exception] = []

        def carry(worker: int) -> None:
            try:
                carry_on(ledgers[worker], worker)
            except (AssertionError, LedgerBroken, BusDown) as error:
                failures.append(error)

        def carry_on(ledger: Ledger, worker: int) -> None:
            for group in range(worker, 300, 3):
                ledger.submit(items(job, group, 2), 2)
                for name in (trajectory_id(job, group, index) for index in range(2)):
                    assert ledger.begin(name, 1, "w0", V0) == "go"
                    assert ledger.publish(record(name, 1, V0), "0-1") == "published"
                    ledger.reward(scored(name))
                    done.append(name)

        threads = [threading.Thread(target=carry, args=(worker,)) for worker in range(3)]
        for thread in threads:
            thread.start()
        for goal in (50, 250, 450):
            wait_until(
                functools.partial(lambda n: len(done) >= n or failures, goal),
                60,
                "trajectories were rewarded",
            )
            server.kill()
            server.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert len(done) == 600
        assert sum(bus.reconnects for bus in buses) >= 3
        sums = holds(ledgers[3])
        assert (sums["submitted"], sums["buffered"], ledgers[3].ready_groups()) == (600, 600, 300)
        records = [decode(entry.fields).trajectory for entry in buses[3].range(TRAJECTORIES.at(job))]
        assert sorted(records) == sorted(done)
        assert len(set(records)) == 600

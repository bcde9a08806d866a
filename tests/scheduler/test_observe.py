"""What the ledger means to the machine, and what a job waits for: pure decisions on hand-made states."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from syncline.contract import events as e
from syncline.contract.job import JobSpec
from syncline.contract.judging import JudgeStatus
from syncline.contract.version_path import VersionId
from syncline.runtime.ledger_shapes import LedgerEntry, OpenGroup
from syncline.scheduler.machine import begin
from syncline.scheduler.observe import Seen, ledger_events, room, seen
from syncline.scheduler.stages import Engine, Stage, State, counted, fleet
from syncline.scheduler.waits import judge_waits, waits

SPEC = JobSpec.model_validate({"name": "n", "model": {"name": "m"}, "batch": {"groups": 2}})
EMPTY = Seen(in_flight=0, ready=0, claimable=False, claimed=False, open=0, unclaimed=0, updates_claimed=0)


def state(stage: Stage, **facts: Any) -> State:
    """A state whose engines have acknowledged the present orders."""
    first, _ = begin(4, ("w0",), "colocated")
    engines = {name: Engine(slept=9, woke=9) for name in first.engines} | facts.pop("engines", {})
    values = {"seq": 9, "minted": VersionId(0, 1), "drained": False, **facts}
    return counted(msgspec.structs.replace(first, stage=stage, engines=fleet(engines.items()), **values))


def group(oldest: int, phase: Any = "ready") -> OpenGroup:
    return OpenGroup(2, 2, 0, oldest, phase, -1)


def entry(state_: Any, worker: str | None = "w0", reward: Any = None) -> LedgerEntry:
    return LedgerEntry(
        trajectory="j1-0-0",
        state=state_,
        attempt=1,
        group=0,
        index=0,
        prompt=0,
        worker=worker,
        version=None,
        update=None,
        reason="",
        stream_id=None,
        work_id=None,
        reward=reward,
    )


def view_of(
    groups: dict[int, OpenGroup], *members: LedgerEntry, version: int = 1, policy: str = "wait"
) -> Seen:
    return seen(groups, members, version - 1, version, 2, 1, policy)


@pytest.mark.parametrize(
    ("member", "counts"),
    [
        (entry("running"), 1),
        (entry("running", worker=None), 0),
        (entry("buffered"), 1),
        (entry("buffered", reward="unscored"), 0),
        (entry("failed"), 0),
    ],
)
def test_in_flight_is_what_was_begun_or_waits_for_its_reward(member: LedgerEntry, counts: int) -> None:
    assert view_of({0: group(1, "open")}, member).in_flight == counts


def test_a_batch_counts_when_it_can_be_claimed_within_the_bound() -> None:
    two = {0: group(1), 1: group(1)}
    assert view_of(two).claimable
    overdue_behind = {
        **two,
        2: group(0, "open"),
    }  # due now and not ready: claiming others would break the bound
    assert not view_of(overdue_behind).claimable
    assert view_of(overdue_behind, policy="expire").claimable
    assert not view_of({0: group(1), 1: group(1, "claimed")}).claimable
    too_old = {0: group(0), 1: group(1)}
    assert not view_of(too_old, version=2, policy="expire").claimable
    assert view_of(too_old, version=2, policy="mask_old_tokens").claimable


def test_events_are_seen_again_until_the_machine_knows() -> None:
    ready = msgspec.structs.replace(EMPTY, ready=2, claimable=True)
    assert ledger_events(state("sample"), ready) == [e.BatchReady(groups=2, seq=9)]
    assert ledger_events(state("sample", batch=True), ready) == []
    assert ledger_events(state("drain"), EMPTY) == [e.Drained(seq=9)]
    assert ledger_events(state("drain", drained=True), EMPTY) == []
    assert ledger_events(state("drain"), msgspec.structs.replace(EMPTY, in_flight=1)) == []


def test_nothing_is_drained_before_every_worker_has_heard_of_the_shut_gate() -> None:
    deaf = {"w0": Engine(slept=3, woke=8), "trainer": Engine(slept=9)}
    assert ledger_events(state("drain", engines=deaf, gate_since=9), EMPTY) == []


def test_a_batch_is_short_only_for_an_awake_trainer_with_updates_to_make() -> None:
    assert ledger_events(state("train"), EMPTY) == [e.BatchShort(groups=0, seq=9)]
    assert ledger_events(state("train", minted=VersionId(0, 4)), EMPTY) == []
    assert ledger_events(state("train", minted=None), EMPTY) == []
    assert ledger_events(state("train", trainer_since=10), EMPTY) == []
    assert ledger_events(state("train"), msgspec.structs.replace(EMPTY, claimed=True)) == []


def test_room_is_one_batch_colocated_and_the_credits_disjoint_and_never_more_than_of_use() -> None:
    assert room(state("sample"), EMPTY, batch=3, max_lag=2) == 3
    assert room(state("flow", mode="disjoint"), EMPTY, batch=3, max_lag=2) == 9
    held = msgspec.structs.replace(EMPTY, open=4, unclaimed=2, updates_claimed=3)
    assert (
        room(state("flow", mode="disjoint"), held, batch=3, max_lag=2) == 1
    )  # one update left, two groups there
    assert room(state("sample"), held, batch=3, max_lag=2) == 0


@pytest.mark.parametrize(
    ("stage", "mode", "policy", "open_", "unclaimed", "claimed", "expected"),
    [
        ("sample", "colocated", "wait", 0, 0, 0, 5),  # a batch of 3 and 2 more
        ("sample", "colocated", "wait", 2, 2, 1, 3),  # what was left over counts
        ("flow", "disjoint", "wait", 0, 0, 0, 6),  # within the lag bound no more could begin
        ("flow", "disjoint", "expire", 0, 0, 0, 8),
        ("sample", "colocated", "wait", 2, 2, 3, 3),  # the last update, with what the one before left
        ("sample", "colocated", "wait", 0, 0, 4, 0),  # every update has its batch: nothing more
    ],
)
def test_oversampling_adds_groups_that_an_update_can_use(
    stage: Any, mode: str, policy: str, open_: int, unclaimed: int, claimed: int, expected: int
) -> None:
    view = msgspec.structs.replace(EMPTY, open=open_, unclaimed=unclaimed, updates_claimed=claimed)
    assert room(state(stage, mode=mode), view, 3, 1, extra=2, policy=policy) == expected


@pytest.mark.parametrize(
    ("facts", "stage", "name", "owner"),
    [
        ({}, "sample", "batch", "rollout"),
        ({}, "drain", "drain", "rollout"),
        ({"drained": True}, "drain", "device", "trainer"),
        ({}, "yield", "device", "trainer"),
        ({"rollout_since": 10}, "clear", "device", "w0"),
        ({"trainer_since": 10}, "train", "device", "trainer"),
        ({}, "sync", "activation", "sync"),
    ],
)
def test_each_stage_that_waits_says_for_whom(
    facts: dict[str, Any], stage: Stage, name: str, owner: str
) -> None:
    [wait] = waits(SPEC, state(stage, **facts), 100.0, {})
    assert (wait.name, wait.owner, wait.since) == (name, owner, 100.0)
    assert wait.deadline > 100.0


def test_a_worker_that_is_deaf_to_the_shut_gate_is_named() -> None:
    engines = {"w0": Engine(woke=9), "w1": Engine(woke=8), "trainer": Engine(slept=9)}
    [wait] = waits(SPEC, state("drain", engines=engines, gate_since=9), 100.0, {})
    assert (wait.name, wait.owner) == ("drain", "w1")


def test_a_process_that_has_not_reported_is_waited_for() -> None:
    [wait] = waits(SPEC, state("flow", mode="disjoint"), 100.0, {"w0": 50.0})
    assert (wait.name, wait.owner, wait.deadline) == ("worker", "w0", 50.0 + SPEC.limits.worker_start)


def test_a_paused_job_waits_for_nobody() -> None:
    assert waits(SPEC, state("paused"), 100.0, {}) == []


JUDGE = JudgeStatus(
    state="answers", since=50.0, reason="HTTP 503", waiting=30, asked=8, oldest=12.0, at=100.0, scored=5
)


def test_a_judge_that_is_quick_or_has_nothing_to_do_is_no_wait() -> None:
    quick = msgspec.structs.replace(JUDGE, oldest=2.0)
    idle = msgspec.structs.replace(JUDGE, state="silent", waiting=0, asked=0, oldest=0.0)
    assert (
        judge_waits(SPEC, quick, 100.0)
        == judge_waits(SPEC, idle, 100.0)
        == judge_waits(SPEC, None, 1.0)
        == []
    )


@pytest.mark.parametrize(
    ("changes", "now", "detail"),
    [
        ({}, 100.0, "8 responses are with it, 30 wait"),
        ({"state": "silent"}, 101.0, "it has not answered for 51 s (HTTP 503): 38 responses wait"),
        (
            {"state": "trying", "oldest": 1.0},
            100.0,
            "it has not answered for 50 s (HTTP 503): 38 responses wait",
        ),
        ({}, 120.0, "nobody has asked it for 20 s: 38 responses wait"),
    ],
)
def test_a_judge_that_is_waited_for_says_so(changes: dict[str, Any], now: float, detail: str) -> None:
    [wait] = judge_waits(SPEC, msgspec.structs.replace(JUDGE, **changes), now)
    assert (wait.name, wait.owner, wait.detail) == ("reward", "judge", detail)
    assert wait.deadline == 100.0 - changes.get("oldest", 12.0) + SPEC.limits.batch_wait / 2

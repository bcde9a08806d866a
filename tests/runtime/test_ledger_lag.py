"""`begin` and `claim` decide exactly as `contract/lag.py`, from arbitrary states and not only from reachable ones."""

from __future__ import annotations

import secrets

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from records import items, record, scored

from syncline.contract import lag
from syncline.contract.streams import CLAIMS
from syncline.contract.token_path import trajectory_id
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus
from syncline.runtime.ledger import LagBroken, Ledger, Policy

STATE = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8)
BATCH = st.integers(1, 3)
LAG = st.integers(0, 3)
VERSION = st.integers(0, 5)
CLAIMED = st.integers(-1, 5)


@pytest.fixture(scope="module")
def bus(redis_url: str) -> Bus:
    return Bus(redis_url)


def world(bus: Bus, state: list[tuple[int, bool]], claimed: int) -> str:
    """A job with one group of one member for each (oldest version, ready)."""
    job = "j" + secrets.token_hex(5)
    free = Ledger(bus, job, batch_groups=1, max_lag=10_000, policy="mask_old_tokens", max_attempts=1)
    for group, (oldest, ready) in enumerate(state):
        name = trajectory_id(job, group, 0)
        free.submit(items(job, group, 1), 1)
        assert free.begin(name, 1, "w0", VersionId(0, oldest)) == "go"
        if ready:
            free.publish(record(name, 1, VersionId(0, oldest)), "0-1")
            free.reward(scored(name))
    if claimed >= 0:
        bus.hset(CLAIMS.at(job), "version", claimed)
    return job


def ledger(bus: Bus, job: str, batch: int, max_lag: int, policy: Policy) -> Ledger:
    return Ledger(bus, job, batch_groups=batch, max_lag=max_lag, policy=policy, max_attempts=1)


@given(state=STATE, batch=BATCH, max_lag=LAG, version=VERSION, claimed=CLAIMED)
@settings(max_examples=150, deadline=None)
def test_begin_is_may_start(
    bus: Bus, state: list[tuple[int, bool]], batch: int, max_lag: int, version: int, claimed: int
) -> None:
    job = world(bus, state, claimed)
    ledger(bus, job, batch, max_lag, "wait").submit(items(job, 99, 1), 1)
    name = trajectory_id(job, 99, 0)
    begun = [oldest for oldest, _ in state]
    for policy, others in (("mask_old_tokens", []), ("expire", []), ("wait", begun)):
        chosen: Policy = "wait" if policy == "wait" else "expire" if policy == "expire" else "mask_old_tokens"
        may = lag.may_start(version, others, claimed, batch, max_lag)
        book = ledger(bus, job, batch, max_lag, chosen)
        assert book.begin(name, 1, "w0", VersionId(0, version)) == ("go" if may else "wait")
        if may:
            assert book.retry(name, "0-1", "again") is None  # one attempt: it ends and leaves no trace
            book.submit(items(job, 100 + len(policy), 1), 1)
            name = trajectory_id(job, 100 + len(policy), 0)


@given(state=STATE, batch=BATCH, max_lag=LAG, version=VERSION)
@settings(max_examples=200, deadline=None)
def test_claim_is_claim(
    bus: Bus, state: list[tuple[int, bool]], batch: int, max_lag: int, version: int
) -> None:
    job = world(bus, state, version - 1)
    begun = dict(enumerate(oldest for oldest, _ in state))
    ready = [(group, oldest) for group, (oldest, is_ready) in enumerate(state) if is_ready]
    expected = lag.claim(ready, begun, version, batch, max_lag)
    first = min((oldest for _, oldest in ready), default=0)
    waiting = ledger(bus, job, batch, max_lag, "wait")
    if len(ready) >= batch and lag.due(first, max_lag) < version:
        with pytest.raises(LagBroken, match=f"began under version {first}"):
            waiting.claim(version + 1, version)
    else:
        claim = waiting.claim(version + 1, version)
        assert (None if claim is None else [part.group for part in claim.groups]) == expected
        waiting.unclaim(version + 1)
    assert waiting.overdue(version) == lag.overdue(begun, version, max_lag)
    in_time = [group for group, oldest in ready if lag.due(oldest, max_lag) >= version]
    for policy, allowed in (("expire", in_time), ("mask_old_tokens", [group for group, _ in ready])):
        book = ledger(bus, job, batch, max_lag, "expire" if policy == "expire" else "mask_old_tokens")
        claim = book.claim(version + 1, version)
        by_deadline = sorted(allowed, key=lambda group: (begun[group], group))[:batch]
        assert [part.group for part in claim.groups] == by_deadline if claim else len(allowed) < batch
        book.unclaim(version + 1)
    assert waiting.groups() == ledger(bus, job, 1, 0, "wait").groups()
    assert waiting.ready_groups() == len(ready)


def test_a_claim_waits_for_an_older_group_that_still_samples(bus: Bus) -> None:
    job = world(bus, [(0, False), (1, True)], 0)
    book = ledger(bus, job, 1, 1, "wait")
    assert lag.claim([(1, 1)], {0: 0, 1: 1}, 1, 1, 1) is None
    assert book.claim(2, 1) is None
    book.publish(record(trajectory_id(job, 0, 0), 1, VersionId(0, 0)), "0-1")
    book.reward(scored(trajectory_id(job, 0, 0)))
    claim = book.claim(2, 1)
    assert claim is not None
    assert claim.groups[0].group == 0

"""`summary.json` counts; it does not repeat what it was told."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import msgspec
import pytest
from evidence import GROUPS, SIZE, evidence, metrics, phase, sample

from syncline.gateway.answers import encoded
from syncline.gateway.evidence import Evidence, LedgerLine, SegmentFacts
from syncline.gateway.summary import last_of_each_update, lost, modes, repeated, summarise

UPDATES = 20
KEYS = {
    "state": None,
    "updates": None,
    "reward": {"first_fifth", "last_fifth"},
    "modes": None,
    "lag": {"max", "mean", "bound"},
    "ledger": {"submitted", "running", "buffered", "trained", "filtered", "failed", "expired"},
    "conservation_violations": None,
    "lost": None,
    "repeated": None,
    "versions": {"minted", "active"},
    "mismatch": None,
    "diagnostics": {"updates", "terms", "unmeasured", "baseline", "alarms"},
    "seconds": {"setup", "training"},
    "lag_policy": {"policy", "waited_seconds", "expired_groups", "masked_tokens", "length", "length_bias"},
    "prompts": {"sources", "lost"},
}


def changed(**changes: object) -> Evidence:
    return msgspec.structs.replace(evidence(UPDATES), **changes)


def test_keys_are_exactly_those_promised() -> None:
    told = json.loads(encoded(summarise(evidence(UPDATES))))
    assert set(told) == set(KEYS)
    for name, inner in KEYS.items():
        if inner is not None:
            assert set(told[name]) == inner, name
    assert told["modes"] == [
        {"mode": "colocated", "update": 0},
        {"mode": "disjoint", "update": 6},
        {"mode": "colocated", "update": 12},
    ]


def test_a_good_job_reads_as_good() -> None:
    s = summarise(evidence(UPDATES))
    assert (s.state, s.updates, s.lost, s.repeated, s.conservation_violations) == (
        "succeeded",
        UPDATES,
        0,
        0,
        0,
    )
    assert s.reward.first_fifth == pytest.approx(0.1 + 0.8 * 1.5 / 19)  # updates 1 to 4
    assert s.reward.last_fifth == pytest.approx(0.9 - 0.8 * 1.5 / 19)
    assert (s.lag.max, s.lag.bound) == (1, 1)
    assert s.lag.mean == pytest.approx(6 / UPDATES)  # updates 6 to 11 ran disjoint
    assert s.versions.minted == s.versions.active == UPDATES + 1
    assert s.mismatch == pytest.approx(0.001)
    assert s.seconds.setup == pytest.approx(7.01)
    assert s.seconds.training == pytest.approx(UPDATES + 2.99)
    assert s.lag_policy.length_bias == pytest.approx(0.0)


def test_a_trained_trajectory_without_a_segment_is_lost() -> None:
    whole = evidence(UPDATES)
    bent = msgspec.structs.replace(whole, segments=whole.segments[1:])
    assert lost(bent) == list(whole.segments[0].trajectories)
    assert summarise(bent).lost == GROUPS * SIZE


@pytest.mark.parametrize("state", ["running", "buffered"])
def test_an_open_trajectory_is_lost_once_the_job_has_ended(state: str) -> None:
    whole = evidence(UPDATES)
    left = msgspec.convert(["jtest-901-0", state], LedgerLine)
    counts = {**whole.counts, "submitted": whole.counts["submitted"] + 1, state: 1}
    bent = msgspec.structs.replace(whole, ledger=(*whole.ledger, left), counts=counts)
    assert lost(bent) == ["jtest-901-0"]
    assert lost(msgspec.structs.replace(bent, state="running")) == []


def test_a_trajectory_that_only_the_counts_know_is_lost() -> None:
    whole = evidence(UPDATES)
    bent = msgspec.structs.replace(whole, ledger=whole.ledger[:-1])
    assert lost(bent) == ["?"]


def test_repeated_is_counted_from_the_segments() -> None:
    whole = evidence(UPDATES)
    twice = whole.segments[0].trajectories[0]
    more = SegmentFacts(
        update=UPDATES,
        trajectories=(*whole.segments[-1].trajectories, twice),
        tokens=(*whole.segments[-1].tokens, 4),
    )
    bent = msgspec.structs.replace(whole, segments=(*whole.segments[:-1], more))
    assert repeated(bent.segments) == [twice]
    assert summarise(bent).repeated == 1
    assert summarise(bent).ledger == summarise(whole).ledger


def test_a_sample_that_says_it_holds_is_added_up_again() -> None:
    lie = msgspec.structs.replace(sample(1.0, 10), submitted=99)  # `holds` still says True
    admitted = msgspec.structs.replace(sample(2.0, 10), holds=False)
    assert summarise(changed(samples=(lie, sample(1.5, 10), admitted))).conservation_violations == 2


def test_final_counts_must_add_up() -> None:
    counts = {**evidence(UPDATES).counts, "trained": 1}
    assert summarise(changed(counts=counts)).conservation_violations == 1


def test_a_repeated_update_counts_once_under_its_highest_epoch() -> None:
    first, second = metrics(3, epoch=0, reward=0.0), metrics(3, epoch=1, reward=1.0)
    for order in ([first, second], [second, first]):
        assert last_of_each_update([metrics(2), *order, metrics(4)]) == [metrics(2), second, metrics(4)]
    s = summarise(changed(metrics=(metrics(1), metrics(2), first, second)))
    assert s.updates == 3


def test_modes_are_told_when_they_change() -> None:
    orders = (
        phase(1, "colocated", "sample", 0),
        phase(2, "colocated", "train", 0),
        phase(3, "disjoint", "flow", 2),
        phase(4, "colocated", "sample", 5),
    )
    told = modes(orders)
    assert [(m.mode, m.update) for m in told] == [("colocated", 0), ("disjoint", 2), ("colocated", 5)]
    assert all(a.mode != b.mode for a, b in pairwise(told))


def test_what_is_not_a_number_never_reaches_json() -> None:
    broken = msgspec.structs.replace(
        metrics(1, reward=math.nan), waited=math.inf, same_version_gap=math.nan, lag_mean=math.nan
    )
    text = encoded(summarise(changed(metrics=(broken,), ledger=(), segments=()))).decode()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the summary"))
    assert json.loads(text)["reward"]["first_fifth"] is None
    assert json.loads(text)["mismatch"] is None


def test_a_job_that_never_began_has_a_summary() -> None:
    nothing = changed(
        state="failed",
        started=None,
        ended=None,
        metrics=(),
        samples=(),
        phases=(),
        versions=(),
        counts={},
        ledger=(),
        segments=(),
    )
    s = summarise(nothing)
    assert (s.updates, s.modes, s.lag.max, s.reward.last_fifth) == (0, (), None, None)
    assert (s.seconds.setup, s.seconds.training, s.lost, s.conservation_violations) == (None, None, 0, 0)


def test_length_bias_is_of_the_policy_and_not_of_the_end() -> None:
    """Long trajectories that the policy dropped are a bias; what was left over at the end is none."""
    whole = evidence(UPDATES)
    trained = summarise(whole).lag_policy.length.trained_mean
    assert trained is not None
    dropped = LedgerLine("jtest-902-0", "expired", "lag", 1000)
    left = LedgerLine("jtest-903-0", "expired", "job ended", 1000)
    bent = summarise(msgspec.structs.replace(whole, ledger=(*whole.ledger, dropped))).lag_policy
    assert bent.length.dropped_mean == 1000
    assert bent.length_bias is not None
    assert bent.length_bias < -0.2
    same = summarise(msgspec.structs.replace(whole, ledger=(*whole.ledger, left))).lag_policy
    assert same.length_bias == pytest.approx(0.0)
    assert same.length.dropped_mean is None


def test_evidence_survives_the_disk() -> None:
    """Also a figure that is no number: it is told as it is, and only JSON says null."""
    whole = evidence(UPDATES)
    odd = msgspec.structs.replace(whole.metrics[0], lag_mean=math.nan, loss=math.inf)
    bent = msgspec.structs.replace(whole, metrics=(odd, *whole.metrics[1:]))
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(bent), type=Evidence)
    assert math.isnan(back.metrics[0].lag_mean)
    assert back.metrics[0].loss == math.inf
    assert (back.metrics[1:], back.ledger, back.versions) == (whole.metrics[1:], whole.ledger, whole.versions)
    assert encoded(summarise(back)) == encoded(summarise(bent))

"""The activation machine: named stories. `test_histories.py` tells it random ones."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from syncline.contract.version_path import Ack, VersionId
from syncline.sync.decide import TwoManifests, held, step
from syncline.sync.state import (
    Acked,
    Broken,
    Effect,
    Ended,
    Event,
    Lost,
    Minted,
    Order,
    Published,
    Reached,
    Refused,
    Scope,
    Seen,
    State,
    Tick,
    Wanted,
)


class Story:
    """A machine with its history, and workers that answer by hand."""

    def __init__(self, scope: Scope, awake: bool = True) -> None:
        self.state = State(wait=10.0, seq=-1, scope=scope, awake=awake)
        self.at = 0.0
        self.orders: list[Order] = []
        self.ends: list[Ended] = []

    def tell(self, event: Event, at: float | None = None) -> list[Effect]:
        self.at = self.at if at is None else at
        self.state, effects = step(self.state, event, self.at)
        self.orders += [e for e in effects if isinstance(e, Order)]
        self.ends += [e for e in effects if isinstance(e, Ended)]
        return effects

    def publish(self, number: int, loaded: str | None = None, complete: bool = False) -> None:
        version = VersionId(0, number)
        self.tell(Minted(version=version))
        self.tell(
            Published(
                version=version,
                digest=f"m{number}",
                loaded=loaded or f"l{number}",
                canaries=True,
                tolerance=0.1,
                complete=complete,
            )
        )

    def join(self, *workers: str) -> None:
        for worker in workers:
            self.tell(Acked(ack=Ack(worker=worker, incarnation="i", kind="joined", version=None)))

    def answer(self, worker: str, number: int, kind: str, **changes: object) -> list[Effect]:
        seq = self.state.workers[worker].order if worker in self.state.workers else -1
        ack = Ack(
            worker=worker,
            incarnation="i",
            kind=kind,  # type: ignore[arg-type]
            version=VersionId(0, number),
            seq=seq,
            digest=f"m{number}",
            loaded_digest=f"l{number}" if kind == "verified" else "",
            canary_gap=0.01 if kind == "verified" else None,
        )
        return self.tell(Acked(ack=replace(ack, **changes)))

    def said(self) -> list[tuple[str, int, tuple[str, ...]]]:
        """Orders since the last call: (what, number, workers)."""
        orders, self.orders = self.orders, []
        return [(o.order, o.version.number, o.workers) for o in orders]

    def ended(self) -> list[tuple[int, str]]:
        ends, self.ends = self.ends, []
        return [(e.version.number, e.how) for e in ends]


def test_a_barrier_commits_when_all_have_verified() -> None:
    s = Story("barrier")
    s.join("w0", "w1")
    s.publish(0)
    assert s.said() == [("stage", 0, ("w0", "w1"))]
    s.answer("w0", 0, "staged")
    s.answer("w0", 0, "verified")
    assert s.said() == []
    s.answer("w1", 0, "verified")
    assert s.said() == [("commit", 0, ("w0", "w1"))]
    s.answer("w0", 0, "active")
    assert s.ended() == []
    s.answer("w1", 0, "active")
    assert s.ended() == [(0, "active")]


def test_rolling_commits_each_and_is_active_with_the_first() -> None:
    s = Story("rolling")
    s.join("w0", "w1")
    s.publish(0)
    s.said()
    s.answer("w1", 0, "verified")
    assert s.said() == [("commit", 0, ("w1",))]
    s.answer("w1", 0, "active")
    assert s.ended() == [(0, "active")]
    s.publish(1)
    assert s.said() == [("stage", 1, ("w1",))], "w0 goes on with what it has begun"
    s.answer("w0", 0, "verified")
    assert s.said() == [("commit", 0, ("w0",))]
    s.answer("w0", 0, "active")
    assert s.said() == [("stage", 1, ("w0",))]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loaded_digest": "other"}, "loaded digest other, expected l0"),
        ({"digest": "other"}, "verified manifest other, expected m0"),
        ({"canary_gap": 0.2}, "canary gap 0.2 exceeds"),
        ({"canary_gap": float("nan")}, "canary gap nan exceeds"),
        ({"canary_gap": None}, "no canary gap reported"),
    ],
)
def test_a_worker_that_disagrees_is_out_and_the_others_go_on(changes: dict[str, object], says: str) -> None:
    s = Story("barrier")
    s.join("w0", "w1")
    s.publish(0)
    s.said()
    effects = s.answer("w0", 0, "verified", **changes)
    assert any(isinstance(e, Reached) and e.what == "out" and says in e.reason for e in effects)
    assert s.said() == [("abort", 0, ("w0",))]
    s.answer("w1", 0, "verified")
    assert s.said() == [("commit", 0, ("w1",))]
    s.answer("w1", 0, "active")
    assert s.ended() == [(0, "active")]
    s.publish(1)
    assert s.said() == [("stage", 1, ("w0", "w1"))], "a newer version is offered to it again"


def test_identical_bytes_are_verified_unchanged() -> None:
    s = Story("rolling")
    s.join("w0")
    s.publish(0, loaded="same")
    s.answer("w0", 0, "verified", loaded_digest="same")
    s.answer("w0", 0, "active")
    s.publish(1, loaded="same")
    effects = s.answer("w0", 1, "verified", loaded_digest="same")
    assert [e.verdict for e in effects if isinstance(e, Reached)] == ["verified, unchanged"]


def test_a_failed_version_names_why_and_the_old_one_serves_on() -> None:
    s = Story("barrier")
    s.join("w0")
    s.publish(0)
    s.answer("w0", 0, "verified")
    s.answer("w0", 0, "active")
    s.publish(1)
    s.said()
    s.answer("w0", 1, "failed", reason="tensor w: bad")
    assert s.said() == []
    s.ended()
    s.tell(Tick(), at=9.9)
    assert s.ended() == []
    ends = [e for e in s.tell(Tick(), at=10.0) if isinstance(e, Ended)]
    assert [(e.how, e.reason.partition("; ")[2]) for e in ends] == [("failed", "w0: tensor w: bad")]
    s.said()
    s.join("w1")
    assert s.said() == [("stage", 0, ("w1",))], "a newcomer gets the last good one"


def test_a_silent_worker_is_out_at_half_the_wait_and_the_barrier_goes_on() -> None:
    s = Story("barrier")
    s.join("w0", "w1")
    s.publish(0)
    s.answer("w0", 0, "verified")
    s.said()
    s.tell(Tick(), at=5.0)
    assert s.said() == [("abort", 0, ("w1",)), ("commit", 0, ("w0",))]
    s.answer("w0", 0, "active")
    assert s.ended() == [(0, "active")]


def test_a_commit_obeyed_late_counts() -> None:
    s = Story("rolling")
    s.join("w0")
    s.publish(0)
    s.answer("w0", 0, "verified")
    order = s.state.workers["w0"].order
    s.tell(Tick(), at=5.0)
    assert s.state.workers["w0"].out == VersionId(0, 0)
    s.answer("w0", 0, "active", seq=order)
    assert s.state.workers["w0"].active == VersionId(0, 0)
    assert s.ended() == [(0, "active")]


def test_an_ack_of_another_order_or_process_changes_nothing() -> None:
    s = Story("rolling")
    s.join("w0")
    s.publish(0)
    s.said()
    before = s.state
    for changes in ({"seq": 99}, {"incarnation": "old"}, {"version": VersionId(0, 7)}):
        effects = s.answer("w0", 0, "verified", **changes)
        assert [type(e) for e in effects] == [Refused]
    s.answer("w0", 0, "active")
    s.answer("nobody", 0, "verified")
    assert s.said() == []
    assert s.state == replace(before, refused=5)


def test_older_versions_are_refused_and_counted() -> None:
    s = Story("rolling")
    s.publish(5)
    s.tell(Minted(version=VersionId(0, 5)))
    assert s.state.refused == 0
    s.tell(Minted(version=VersionId(0, 4)))
    s.tell(Published(version=VersionId(0, 3), digest="m3", loaded="l", canaries=False, tolerance=0))
    assert s.state.refused == 2
    assert s.ended() == [(4, "superseded"), (3, "superseded")]
    s.tell(Minted(version=VersionId(1, 2)))
    assert s.state.newest == VersionId(1, 2)


def test_one_version_has_one_manifest() -> None:
    s = Story("rolling")
    s.publish(1)
    before = s.state
    s.publish(1)
    assert s.state == before
    with pytest.raises(TwoManifests, match=r"0\.1"):
        s.tell(Published(version=VersionId(0, 1), digest="x", loaded="l", canaries=False, tolerance=0))


def test_only_the_newest_minted_one_matters() -> None:
    s = Story("rolling")
    for number in range(3):
        s.tell(Minted(version=VersionId(0, number)))
    assert s.ended() == [(0, "superseded"), (1, "superseded")]
    s.tell(Broken(version=VersionId(0, 2), reason="tensor w is nan"))
    assert s.ended() == [(2, "failed")]


def test_who_waits_for_a_barrier_may_ask_meanwhile() -> None:
    s = Story("barrier")
    s.join("w0", "w1")
    s.publish(0)
    s.answer("w0", 0, "verified")
    s.said()
    s.join("w0")
    assert s.said() == []
    s.answer("w1", 0, "verified")
    assert s.said() == [("commit", 0, ("w0", "w1"))]
    s.join("w0")
    assert s.said() == [("stage", 0, ("w0",))], "it slept: what was staged is gone"


def test_a_barrier_under_way_gives_way_to_a_newer_version() -> None:
    s = Story("barrier")
    s.join("w0", "w1")
    s.publish(0)
    s.answer("w0", 0, "verified")
    s.said()
    s.publish(1)
    assert s.said() == [("stage", 1, ("w0",))]
    s.answer("w1", 0, "verified")
    assert s.said() == [("stage", 1, ("w1",))]
    assert s.ended() == [(0, "superseded")]


def test_while_rollout_sleeps_nothing_is_ordered_and_no_clock_runs() -> None:
    s = Story("barrier", awake=False)
    s.join("w0")
    s.publish(0)
    s.tell(Tick(), at=1000.0)
    assert (s.said(), s.ended()) == ([], [])
    s.tell(Wanted(scope="barrier", awake=True))
    assert s.said() == [("stage", 0, ("w0",))]
    s.answer("w0", 0, "verified")
    assert s.said() == [("commit", 0, ("w0",))]
    s.tell(Wanted(scope="barrier", awake=False), at=1001.0)
    s.tell(Tick(), at=2000.0)
    s.tell(Wanted(scope="barrier", awake=True), at=2001.0)
    assert s.ended() == []
    s.answer("w0", 0, "active")
    assert s.ended() == [(0, "active")]


def test_a_version_without_workers_waits() -> None:
    s = Story("rolling")
    s.publish(0)
    s.tell(Tick(), at=1000.0)
    assert s.ended() == []
    s.join("w0")
    assert s.said() == [("stage", 0, ("w0",))]


def test_a_dead_worker_does_not_hold_a_barrier() -> None:
    s = Story("barrier")
    s.join("w0", "w1")
    s.publish(0)
    s.answer("w0", 0, "verified")
    s.said()
    s.tell(Lost(worker="w1"))
    assert s.said() == [("commit", 0, ("w0",))]
    s.answer("w0", 0, "active")
    assert s.ended() == [(0, "active")]
    s.join("w1")
    assert s.said() == [("stage", 0, ("w1",))]
    s.answer("w1", 0, "verified")
    assert s.said() == [("commit", 0, ("w1",))]


def test_a_switch_to_rolling_frees_a_waiting_barrier() -> None:
    s = Story("barrier")
    s.join("w0", "w1")
    s.publish(0)
    s.answer("w0", 0, "verified")
    s.said()
    s.tell(Wanted(scope="rolling", awake=True))
    assert s.said() == [("commit", 0, ("w0",))]


def test_a_restart_finds_who_serves_what() -> None:
    s = Story("rolling")
    s.publish(3, complete=True)
    s.tell(Seen(worker="w0", incarnation="i", version=VersionId(0, 3), digest="m3"))
    s.tell(Seen(worker="w1", incarnation="i", version=VersionId(0, 2), digest="m2"))
    s.tell(Seen(worker="w2", incarnation="i", version=VersionId(0, 3), digest="forged"))
    s.tell(Seen(worker="w3", incarnation="i", version=None, digest=""))
    assert s.said() == [("stage", 3, ("w1",)), ("stage", 3, ("w2",)), ("stage", 3, ("w3",))]
    assert s.ended() == [], "its scope was complete before"
    assert held(s.state) == {VersionId(0, 2), VersionId(0, 3)}

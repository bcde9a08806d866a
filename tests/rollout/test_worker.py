"""A real worker process against a real Redis; the test plays scheduler, trainer and sync."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from conformance.forge import cold_logprobs, gap, plain
from waiting import wait_until
from worker_world import World, world

from syncline.contract.events import Slept, Woke, WorkerUp
from syncline.contract.streams import CELERY, GROUP_ROLLOUT, WORK
from syncline.contract.token_path import Trajectory
from syncline.contract.version_path import VersionId
from syncline.runtime.ledger import LedgerEntry
from syncline.runtime.trace_store import spans_of

# two groups take a worker of this pace some seconds: time to see that they run
SLOW = {
    "sampling": {"length_median": 60, "length_sigma": 0.1, "max_tokens": 80},
    "rollout": {"pace": [0.02, 1]},
}


def judge(w: World, t: Trajectory) -> None:
    """The record's log-probs are those of the versions that its spans name."""
    assert t.expert_shape is not None
    for span in t.spans:
        first, end = t.segments[0].end + span.start, t.segments[0].end + span.end
        cold = cold_logprobs(plain(w.forge.folder, span.version.number), list(t.tokens[:end]), first)
        assert gap(t.logprobs[span.start : span.end], cold) < 5e-5


def test_a_version_is_verified_and_work_is_sampled_under_it(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path) as w:
        wanted = w.submit(3)
        process = w.start()
        up = w.event(WorkerUp)
        assert up.who == "w0"
        assert not w.published(), "no version, no phase: nothing begins"
        seq = w.phase()
        woke = w.event(Woke, lambda e: e.seq == seq)
        assert woke.version is None
        w.joined()
        stage = w.order("stage", 0)
        staged, verified = w.ack("staged", stage), w.ack("verified", stage)
        assert staged.nbytes == w.forge.manifest(0).nbytes()
        assert verified.verdict == "verified"
        assert verified.canary_gap is not None
        assert verified.canary_gap < 1e-4
        assert not w.published(), "a verified version serves nobody before its commit"
        active = w.ack("active", w.order("commit", 0))
        assert active.incarnation == up.incarnation
        records = w.wait_published(wanted)
        for record in records.values():
            judge(w, record)
            assert record.attempt == 1
            assert record.spans[0].version == VersionId(0, 0)
            assert record.text
        prompts = {r.group: tuple(r.tokens[: r.segments[0].end]) for r in records.values()}
        assert len(set(prompts.values())) == 3
        assert w.bus.length(WORK.at(job)) == 0
        errands = wait_until(lambda: w.bus.many([("LLEN", CELERY.at("errands"))])[0], 10, "score errands")
        assert errands >= 1
        wait_until(
            lambda: (s := w.status()) and s.version == VersionId(0, 0), 10, "the status says what it serves"
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, w.log()
        names = [span.name for span in spans_of(w.settings.traces, trajectory=wanted[0])]
        assert names == ["token.sampled", "token.published"]
        version = [span.name for span in spans_of(w.settings.traces, version="0.0")]
        assert {"version.staged", "version.verified", "version.active"} <= set(version)


def test_a_version_whose_canary_disagrees_is_never_served(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path) as w:
        w.start()
        w.phase()
        w.install(0)
        wrong = w.order("stage", 1, canary_of=2)
        failed = w.ack("failed", wrong)
        assert "canary gap" in failed.reason
        assert failed.canary_gap is not None
        assert failed.canary_gap > 1e-3
        refused = w.ack("failed", w.order("commit", 1))
        assert "not staged" in refused.reason
        old = w.order("stage", 2)
        w.ack("verified", old)
        w.ack("aborted", w.order("abort", 2))
        for record in w.wait_published(w.submit(2)).values():
            assert {span.version for span in record.spans} == {VersionId(0, 0)}
            judge(w, record)


def test_versions_come_while_requests_run_and_spans_say_so(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path, schedule={"in_flight": "in_place"}, **SLOW) as w:
        w.start()
        w.phase()
        w.install(0)
        wanted = w.submit(2)
        for number in (1, 2):
            wait_until(lambda: (s := w.status()) is not None and s.running, 20, "requests run")
            w.install(number)
        records = w.wait_published(wanted)
        assert max(len(record.spans) for record in records.values()) >= 2
        for record in records.values():
            judge(w, record)


def test_sleep_and_wake_are_acknowledged_with_their_order(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path) as w:
        asleep = w.phase(rollout="asleep", gate="shut", mode="colocated")
        w.start()
        first = w.event(Slept, lambda e: e.seq == asleep)
        assert first.resident <= 1.1 * first.baseline
        w.phase(mode="colocated")
        w.install(0)
        w.wait_published(w.submit(1))
        shut = w.phase(gate="shut", mode="colocated")
        w.event(Woke, lambda e: e.seq == shut)
        more = w.submit(1)
        asleep = w.phase(rollout="asleep", gate="shut", mode="colocated")
        slept = w.event(Slept, lambda e: e.seq == asleep)
        assert slept.resident <= 1.1 * slept.baseline
        staged = w.order("stage", 1)
        awake = w.phase(mode="colocated")
        woke = w.event(Woke, lambda e: e.seq == awake)
        assert woke.version == VersionId(0, 0)
        w.ack("verified", staged)
        wait_until(lambda: len(w.published()) == 8, 30, "the second group is sampled after waking")
        assert {t.trajectory for t in w.published()} >= set(more)


# a task whose records hold turns, each of which takes a slow worker some seconds
TURNS = {
    "task": {"environment": "calculator"},
    "sampling": {"length_median": 30, "length_sigma": 0.1},
    "rollout": {"pace": [0.02, 1]},
}


def moved(records: Iterable[Trajectory]) -> dict[int, set[str]]:
    """By attempt, what first turns say of the worker that held the session before."""
    found: dict[int, set[str]] = {1: {""}}
    for record in records:
        found.setdefault(record.attempt, set()).add(record.turns[0].moved)
    return found


def test_a_killed_workers_requests_are_sampled_again(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path, **TURNS) as w:
        process = w.start("w0")
        w.phase()
        w.install(0)
        wanted = w.submit(3)
        wait_until(lambda: (s := w.status()) is not None and s.running > 4, 30, "w0 samples")
        process.kill()
        process.wait()
        w.start("w0")
        w.install(0)
        records = w.wait_published(wanted)
        assert {record.attempt for record in records.values()} >= {2}
        assert moved(records.values()) == {1: {""}, 2: {"its worker restarted"}}
        assert w.bus.group_pending_count(WORK.at(job), GROUP_ROLLOUT) == 0


def test_a_silent_workers_requests_are_taken_over(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path, **TURNS) as w:
        process = w.start("w0")
        w.start("w1")
        w.phase()
        w.install(0, "w0")
        wanted = w.submit(3)
        wait_until(lambda: (s := w.status()) is not None and s.running > 4, 30, "w0 samples")
        process.send_signal(signal.SIGSTOP)
        w.install(0, "w1")
        records = w.wait_published(wanted)
        assert {record.spans[0].worker for record in records.values() if record.attempt == 2} == {"w1"}
        assert {told.split(" for ")[0] for told in moved(records.values())[2]} == {"its worker was silent"}
        process.send_signal(signal.SIGCONT)  # the frozen one wakes: what it still has is fenced
        wait_until(lambda: "taken over from this worker" in w.log("w0"), 30, "w0 learns of it")
        assert sorted(t.trajectory for t in w.published()) == sorted(wanted)


def test_a_prompt_that_no_worker_can_sample_ends_as_failed(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path, sampling={"max_tokens": 1024}) as w:
        w.start()
        w.phase()
        w.install(0)
        name = w.submit(1)[0]

        def ended() -> LedgerEntry | None:
            entry = w.ledger.entry(name)
            return entry if entry is not None and entry.state == "failed" else None

        entry = wait_until(ended, 30, "ended")
        assert "exceed the model's 1024 positions" in entry.reason


def test_nothing_begins_that_would_break_the_lag_bound(redis_url: str, job: str, tmp_path: Path) -> None:
    tight = {"batch": {"groups": 1, "group_size": 2}, "schedule": {"max_lag": 1}}
    with world(redis_url, job, tmp_path, **tight) as w:
        w.start()
        w.phase()
        w.install(0)
        # a batch of one group and lag 1: version 0 may begin the groups of updates 0 and 1, version 1 one more
        w.submit(4)
        for number, allowed in ((0, 2), (1, 3)):
            if number:
                w.install(number)
            wait_until(lambda n=allowed: len(w.published()) >= 2 * n, 30, f"{allowed} groups")  # type: ignore[misc]
            wait_until(lambda: (s := w.status()) is not None and s.waiting > 0, 30, "the next one waits")
            assert len(w.published()) == 2 * allowed
        assert [t.spans[0].version.number for t in w.published()] == [0] * 4 + [1] * 2

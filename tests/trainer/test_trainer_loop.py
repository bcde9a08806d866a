"""The trainer's loop against a real ledger: phases, updates, metrics, hops, the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from trainer_records import reward, trajectory
from waiting import wait_until
from world import InProcess, World, spec_of

from syncline.contract import events
from syncline.contract.streams import DEAD, HEARTBEAT, HELD, REWARDS, TRAJECTORIES
from syncline.contract.version_path import VersionId
from syncline.runtime import segments, tracing
from syncline.runtime.bus import pack
from syncline.runtime.lease import Devices
from syncline.trainer.scored import AT_FIRST, LATER, NothingScored, Scored


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[Path]:
    tracing.setup("trainer", "trainer", tmp_path / "traces.sqlite", None)
    yield tmp_path / "traces.sqlite"
    tracing.setup("unnamed", "unnamed", None, None)


def test_a_job_in_flow_from_its_first_version_to_its_end(
    redis_url: str, job: str, tmp_path: Path, traces: Path
) -> None:
    world = World(redis_url, job, tmp_path, spec_of())
    world.order("train", "awake")
    trainer = InProcess(world)
    first = world.await_version(VersionId(0, 0))
    assert first.parent is None
    assert set(first.files) == {"model.safetensors", "config.json"}
    assert len(first.canaries) == 4
    world.order("flow", "awake")
    made = []
    for version in range(4):
        made += world.feed(2, version)
        world.await_version(VersionId(0, version + 1))
    finished = wait_until(
        lambda: [e for e in world.said() if isinstance(e, events.Finished)], 30, "the last checkpoint"
    )
    assert finished == [events.Finished(updates=4)]
    trainer.stop()

    assert world.versions() == [VersionId(0, n) for n in range(5)]
    assert len({m.files["model.safetensors"] for m in world.minted()}) == 5
    counts = world.ledger.counts()
    assert (counts["submitted"], counts["trained"]) == (16, 16)
    assert world.bus.length(TRAJECTORIES.at(job)) == 0
    assert world.bus.hlen(REWARDS.at(job)) == 0
    assert [m.update for m in world.metrics()] == [1, 2, 3, 4]
    told = world.metrics()[1]
    assert (told.groups, told.trajectories, told.lag_max, told.skipped) == (2, 4, 0, False)
    assert told.tokens == sum(t.sampled for t in made[4:8])
    assert told.reward == pytest.approx(0.55)
    assert told.gap_mean is not None
    assert told.same_version_gap == told.gap_mean
    assert [part.component for part in told.trace] == ["fprop", "dgrad", "wgrad", "optimizer"]
    assert told.trace[0].uses[0].kernel == "wide fp32"
    assert sorted(p.name for p in (world.folder / "checkpoints").glob("update-*")) == [
        "update-000002",
        "update-000004",
    ]
    rows = segments.read(segments.segment_path(world.folder / "segments", 2)).rows
    assert [row.trajectory for row in rows] == made[4:8]
    scored = segments.read_scores(segments.scores_path(world.folder / "segments", 2))
    assert [len(row.logprobs) for row in scored.rows] == [t.sampled for t in made[4:8]]
    assert scored.minted == VersionId(0, 2)

    tracing.flush()
    spans = tracing.read_trace(traces, made[4].traceparent.split("-")[1])
    assert [span.name for span in spans] == ["token.admitted", "token.scored", "token.trained"]
    minted = tracing.spans_of(traces, version="0.2", job=job)
    assert [span.name for span in minted if span.name == "version.minted"] == ["version.minted"]
    assert {link.split("-")[1] for link in minted[0].links} == {
        t.traceparent.split("-")[1] for t in made[4:8]
    }
    assert spans[2].links == (world.minted()[2].traceparent,)


def test_colocated_makes_one_update_per_train_phase_and_sleeps_between(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    world = World(redis_url, job, tmp_path, spec_of())
    first = world.order("train", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    world.feed(4)
    asleep = world.order("sample", "asleep")
    wait_until(lambda: [e for e in world.said() if isinstance(e, events.Slept)], 20, "sleep")
    again = world.order("train", "awake")
    world.await_version(VersionId(0, 1))
    repeated = world.order("train", "awake")  # a process was lost: the same order under a new number
    wait_until(
        lambda: any(isinstance(e, events.Woke) and e.seq == repeated for e in world.said()),
        20,
        "the answer",
    )
    trainer.stop()
    assert world.versions() == [VersionId(0, 0), VersionId(0, 1)]
    woke = [e for e in world.said() if isinstance(e, events.Woke)]
    assert [e.seq for e in woke] == [first, again, repeated]
    assert [e.version for e in woke] == [VersionId(0, 0), VersionId(0, 0), VersionId(0, 1)]
    slept = [e for e in world.said() if isinstance(e, events.Slept)]
    assert [e.seq for e in slept] == [asleep]


def test_a_batch_that_never_comes_fails_the_job_by_name(redis_url: str, job: str, tmp_path: Path) -> None:
    world = World(redis_url, job, tmp_path, spec_of(limits={"batch_wait": 0.3}))
    world.order("flow", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    world.feed(1)
    wait_until(lambda: trainer.error, 20, "the deadline")
    with pytest.raises(RuntimeError, match=r"no batch for update 1 .* 1 of 2 groups are ready"):
        trainer.stop()


def test_what_cannot_be_trained_ends_with_its_reason(redis_url: str, job: str, tmp_path: Path) -> None:
    world = World(redis_url, job, tmp_path, spec_of(batch={"groups": 2, "group_size": 4}))
    world.order("flow", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    first = world.feed(1, rewards=lambda g, i: None if i == 2 else float(i))
    poisoned = world.ledger.entry(first[3].trajectory)
    assert poisoned is not None
    assert poisoned.stream_id is not None
    world.bus.delete_entries(TRAJECTORIES.at(job), [poisoned.stream_id])
    second = world.feed(1, rewards=lambda g, i: None if i else 1.0)
    world.await_version(VersionId(0, 1))
    trainer.stop()
    states = {t.trajectory: world.ledger.entry(t.trajectory) for t in first + second}
    assert [e.state for e in states.values() if e] == ["trained", "trained", "filtered", "failed"] + [
        "filtered"
    ] * 4
    reasons = [e.reason for e in states.values() if e]
    assert "unscored: timed out" in reasons[2]
    assert "gone from the stream" in reasons[3]
    assert "fewer than two scored" in reasons[4]
    segment = segments.read(segments.segment_path(world.folder / "segments", 1))
    assert len(segment.rows) == 2
    assert len(segment.filtered) == 5
    assert list(segment.lost) == [first[3].trajectory]
    assert world.metrics()[0].unscored == 4
    assert world.ledger.sample(0.0).holds


def test_an_update_with_nothing_to_train_on_mints_the_same_weights(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    world = World(redis_url, job, tmp_path, spec_of())
    world.order("flow", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    world.feed(2, rewards=lambda g, i: None)
    second = world.await_version(VersionId(0, 1))
    trainer.stop()
    assert second.files == world.minted()[0].files
    told = world.metrics()[0]
    assert (told.skipped, told.trajectories, told.loss, told.reward) == (True, 0, None, None)
    assert world.ledger.counts()["filtered"] == 4


def test_expire_ends_what_is_over_the_bound(redis_url: str, job: str, tmp_path: Path) -> None:
    spec = spec_of(schedule={"lag_policy": "expire", "updates": 9})
    world = World(redis_url, job, tmp_path, spec)
    world.order("flow", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    (slow,) = world.begin(1, 0)
    for version in range(2):
        world.feed(2, version)
        world.await_version(VersionId(0, version + 1))
    wait_until(lambda: world.ledger.counts()["expired"] == 2, 20, "the slow group's end")
    world.feed(2, 2)
    world.await_version(VersionId(0, 3))
    trainer.stop()
    entry = world.ledger.entry(f"{job}-{slow}-0")
    assert entry is not None
    assert (entry.state, entry.reason) == ("expired", "over the lag bound of 1 at version 2")
    assert [m.expired for m in world.metrics()] == [0, 0, 1]
    assert world.ledger.sample(0.0).holds


def test_mask_old_tokens_trains_on_the_young_ones_alone(redis_url: str, job: str, tmp_path: Path) -> None:
    spec = spec_of(schedule={"lag_policy": "mask_old_tokens", "updates": 9})
    world = World(redis_url, job, tmp_path, spec)
    world.order("flow", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    mixed, old = world.begin(2, 0)
    for version in range(2):
        world.feed(2, version)
        world.await_version(VersionId(0, version + 1))
    world.publish(mixed, versions=(0, 2), sampled=6)
    world.publish(old, versions=(0,), sampled=5)
    world.await_version(VersionId(0, 3))
    trainer.stop()
    segment = segments.read(segments.segment_path(world.folder / "segments", 3))
    assert [(row.trajectory.group, row.used_mask) for row in segment.rows] == [(mixed, b"\0\0\0\1\1\1")] * 2
    assert [row.why for row in segment.filtered] == ["every token is over the lag bound"] * 2
    told = world.metrics()[2]
    assert (told.tokens, told.masked_tokens, told.trajectories, told.lag_max) == (6, 16, 2, 2)


def test_a_step_that_is_not_finite_is_skipped_and_said(redis_url: str, job: str, tmp_path: Path) -> None:
    world = World(redis_url, job, tmp_path, spec_of(loss={"advantage": "group_mean"}))
    world.order("flow", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    world.feed(2, rewards=lambda g, i: 1e300 if i else -1e300)  # finite, but its advantage is not in FP32
    world.await_version(VersionId(0, 1))
    world.feed(2, 1)
    world.await_version(VersionId(0, 2))
    trainer.stop()
    zeroth, first, second = (m.files["model.safetensors"] for m in world.minted())
    assert zeroth == first != second
    told = world.metrics()
    assert [m.skipped for m in told] == [True, False]
    assert told[0].non_finite > 0
    assert world.ledger.counts()["filtered"] == 4
    assert world.ledger.sample(0.0).holds
    segment = segments.read(segments.segment_path(world.folder / "segments", 1))
    assert segment.rows == ()
    assert "the step of update 1 was skipped" in segment.filtered[0].why
    assert segments.read_scores(segments.scores_path(world.folder / "segments", 1)).skipped


def test_an_unreadable_record_is_buried_and_its_group_goes_on(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    world = World(redis_url, job, tmp_path, spec_of(batch={"groups": 1, "group_size": 3}))
    world.order("train", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    made = world.feed(1)
    entry = world.ledger.entry(made[1].trajectory)
    assert entry is not None
    assert entry.stream_id is not None
    spoiled = world.bus.append(TRAJECTORIES.at(job), {b"m": b"not msgpack"})
    raw = msgspec.msgpack.decode(world.bus.hget(HELD.at(job), made[1].trajectory) or b"")
    raw[10] = spoiled
    world.bus.hset(HELD.at(job), made[1].trajectory, msgspec.msgpack.encode(raw))
    world.order("flow", "awake")
    world.await_version(VersionId(0, 1))
    trainer.stop()
    states = [world.ledger.entry(t.trajectory) for t in made]
    assert [e.state for e in states if e] == ["trained", "failed", "trained"]
    letters = world.bus.range(DEAD.at(job))
    assert any(letter.fields.get(b"id") == spoiled.encode() for letter in letters)
    assert all(letter.fields[b"reason"].startswith(b"trajectory record") for letter in letters)


def test_it_waits_by_name_for_a_device_that_rollout_still_holds(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    world = World(redis_url, job, tmp_path, spec_of())
    rollout = Devices(world.bus, HEARTBEAT.at(f"{job}/rollout/w0"), "i0")
    beat = events.Heartbeat(
        service="rollout", name="w0", incarnation="i0", pid=1, port=None, ready=True, why="", at=0.0
    )
    world.bus.set(HEARTBEAT.at(f"{job}/rollout/w0"), pack(beat))
    assert rollout.acquire(f"{job}/shared", "w0", 1 << 20, 1 << 33)
    world.order("train", "awake")
    trainer = InProcess(world)
    wait_until(lambda: "held by w0 (1 MB)" in trainer.ctx.heartbeat().why, 20, "the named wait")
    assert not trainer.ctx.heartbeat().ready
    assert world.versions() == []
    rollout.release(f"{job}/shared", "w0")
    world.await_version(VersionId(0, 0))
    wait_until(lambda: trainer.ctx.heartbeat().ready, 20, "ready again")
    assert not rollout.acquire(f"{job}/shared", "w0", 1 << 20, 1 << 33)
    world.order("sample", "asleep")
    wait_until(lambda: rollout.acquire(f"{job}/shared", "w0", 1 << 20, 1 << 33), 20, "the device back")
    trainer.stop()


def test_a_second_trainer_waits_until_the_first_has_left(redis_url: str, job: str, tmp_path: Path) -> None:
    world = World(redis_url, job, tmp_path, spec_of())
    world.order("flow", "awake")
    first = InProcess(world)
    world.await_version(VersionId(0, 0))
    second = InProcess(world)
    world.feed(2)
    world.await_version(VersionId(0, 1))
    assert world.versions() == [VersionId(0, 0), VersionId(0, 1)]
    first.stop()
    world.await_version(VersionId(1, 1))
    second.stop()


def test_a_scorer_that_never_answers_ends_the_job_with_its_words(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    world = World(redis_url, job, tmp_path, spec_of())
    world.order("flow", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    for version in range(AT_FIRST):
        world.feed(2, version, rewards=lambda g, i: None)
        world.await_version(VersionId(0, version + 1))
    wait_until(lambda: trainer.error is not None, 30, "the end of a trainer that is given nothing scored")
    with pytest.raises(NothingScored, match=r"3 updates in a row had no scored trajectory.*timed out"):
        trainer.stop()
    assert not [e for e in world.said() if isinstance(e, events.Finished)]
    assert world.ledger.counts()["filtered"] == 4 * AT_FIRST


def test_once_something_was_scored_an_outage_is_borne_longer() -> None:
    def segment(value: float | None) -> segments.Segment:
        t = trajectory("j7", 0, 0)
        row = segments.SegmentRow(
            trajectory=t,
            reward=reward(t, value),
            use="filtered",
            why="reward unscored: timed out",
            lag=0,
            advantage=0.0,
            used_mask=bytes(t.sampled),
        )
        return segments.Segment(
            job="j7", update=1, base=VersionId(0, 0), contract="c", spec_hash="h", members=(row,), lost={}
        )

    watch = Scored(100, 0)
    watch.note(segment(None))
    watch.note(segment(0.5))
    for _ in range(LATER - 1):
        watch.note(segment(None))
    watch.note(segment(0.0))  # a reward of 0 is a reward
    resumed = Scored(100, 7)
    for _ in range(LATER - 1):
        watch.note(segment(None))
        resumed.note(segment(None))
    with pytest.raises(NothingScored, match=f"{LATER} updates in a row"):
        resumed.note(segment(None))
    with pytest.raises(NothingScored, match="1 updates in a row"):
        Scored(1, 0).note(segment(None))

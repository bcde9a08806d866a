"""A request that an engine had to begin anew before its first token: the ledger hears under which version it began."""

from __future__ import annotations

from pathlib import Path

import pytest
from waiting import wait_until
from worker_world import World, world

import syncline.rollout.intake as intake_module
from syncline.contract.token_path import SamplingConvention, Trajectory
from syncline.contract.version_path import VersionId
from syncline.rollout.engine import Chunk
from syncline.rollout.intake import Held, Intake
from syncline.rollout.spans import fold, trajectory
from syncline.runtime.ledger import StampMismatch


def begun(w: World, pinned: bool = False) -> tuple[Intake, list[Held]]:
    """An intake whose items have begun under version 0.3."""
    w.submit(1)
    intake = Intake(w.bus, w.ledger, w.job, "w0", 30.0, pinned)
    intake.recover()
    intake.take(16)
    held: list[Held] = []
    intake.begin(VersionId(0, 3), 16, held.append)
    assert len(held) == 4
    return intake, held


def test_who_leaves_keeps_what_has_begun_and_others_take_the_rest_at_once(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    with world(redis_url, job, tmp_path) as w:
        intake, first = begun(w)
        w.submit(1)
        intake.take(16)
        assert len(intake.waiting) == 4
        intake.hand_back(begun=False)
        assert set(intake.held) == {held.item.trajectory for held in first}
        other = Intake(w.bus, w.ledger, w.job, "w1", 30.0)
        other.take(16)
        assert len(other.waiting) == 4, "a look that is due"
        other.hand_back(begun=False)

        def looked() -> bool:
            other.take(16, soon=True)
            return bool(other.waiting)

        wait_until(looked, 10, "a look before that is due")
        assert {held.attempt for held in other.waiting} == {3}
        assert not set(other.held) & set(intake.held)


def test_what_waits_is_asked_about_again_as_soon_as_another_version_serves(
    redis_url: str, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "_ASK_AGAIN", 1000.0)
    tight = {"batch": {"groups": 1, "group_size": 2}, "schedule": {"max_lag": 1}}
    with world(redis_url, job, tmp_path, **tight) as w:
        w.submit(3)
        intake = Intake(w.bus, w.ledger, w.job, "w0", 30.0, alone=True)
        intake.recover()
        intake.take(64)
        assert len(intake.waiting) == 6, "alone it takes all"
        held: list[Held] = []
        for number, begun in ((0, 4), (0, 4), (1, 6)):
            intake.begin(VersionId(0, number), 64, held.append)
            assert len(held) == begun
        assert [one.version for one in held] == [VersionId(0, 0)] * 4 + [VersionId(0, 1)] * 2


def record(held: Held, oldest: VersionId) -> Trajectory:
    """One token, sampled under `oldest`."""
    chunk = Chunk(
        trajectory=held.item.trajectory,
        start=0,
        tokens=(5,),
        logprobs=(-1.0,),
        version=oldest,
        digest="d",
        began=0.0,
        ended=1.0,
        finish="length",
    )
    return trajectory(
        held.item,
        held.attempt,
        (1, 5),
        fold([chunk], "w0"),
        convention=SamplingConvention(),
        contract="c",
        text="",
        traceparent="",
        queued=0.0,
    )


def test_a_first_token_under_a_later_version_is_told_to_the_ledger(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    with world(redis_url, job, tmp_path) as w:
        intake, (first, second, *_) = begun(w)
        later = VersionId(0, 4)
        with pytest.raises(StampMismatch, match=r"version 0\.4, the ledger let it begin under 0\.3"):
            w.ledger.publish(record(first, later), first.work_id)
        assert intake.sampled(first.item.trajectory, later)
        assert w.ledger.publish(record(first, later), first.work_id) == "published"
        entries = w.ledger.entries([first.item.trajectory, second.item.trajectory])
        assert entries[first.item.trajectory].version == later
        assert entries[second.item.trajectory].version == VersionId(0, 3)


def test_a_first_token_under_an_older_version_stays_a_mismatch(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    with world(redis_url, job, tmp_path) as w:
        intake, (first, *_) = begun(w)
        older = VersionId(0, 2)
        assert intake.sampled(first.item.trajectory, older)
        with pytest.raises(StampMismatch, match=r"version 0\.2, the ledger let it begin under 0\.3"):
            w.ledger.publish(record(first, older), first.work_id)


def test_what_is_pinned_to_a_version_is_sampled_again(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path) as w:
        intake, (first, *_) = begun(w, pinned=True)
        assert intake.sampled(first.item.trajectory, VersionId(0, 3))
        assert not intake.sampled(first.item.trajectory, VersionId(0, 4))
        (again,) = intake.waiting
        assert (again.item.trajectory, again.attempt) == (first.item.trajectory, first.attempt + 1)
        assert w.ledger.publish(record(first, VersionId(0, 4)), first.work_id) == "fenced"

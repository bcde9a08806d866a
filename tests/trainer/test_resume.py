"""A trainer that died anywhere resumes to the same weights, bit by bit, and nothing is lost or trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until
from world import InProcess, Killed, Process, World, spec_of

from syncline.contract import events
from syncline.contract.streams import CLAIMS, COUNTS, ENTRIES, GROUPS, HELD, READY, REWARDS, TRAJECTORIES
from syncline.contract.version_path import VersionId
from syncline.runtime import segments
from syncline.runtime.ledger import Ledger
from syncline.trainer.checkpoint import Checkpoints
from syncline.trainer.engines.torch import TorchEngine
from syncline.trainer.minting import Mint

UPDATES = 5
SPEC = spec_of(schedule={"updates": UPDATES, "max_lag": 4}, optimizer={"lr": 0.01, "warmup": 3})


def go_on(world: World, held: VersionId, fed: int) -> None:
    """Feed the batches of the updates after `held`, those before `fed` being there already, up to the end."""
    for number in range(held.number, UPDATES):
        if number >= fed:
            world.feed(2, number, held.epoch)
        world.await_version(VersionId(held.epoch, number + 1))
    wait_until(lambda: any(isinstance(e, events.Finished) for e in world.said()), 30, "the last checkpoint")


def weights(world: World, version: VersionId) -> str:
    return next(m.files["model.safetensors"] for m in world.minted() if m.version == version)


@pytest.fixture(scope="module")
def uninterrupted(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """sha256 of the last version's weights of a run that nobody disturbed."""
    world = World(redis_url, "jaaaaaaaaaa", tmp_path_factory.mktemp("whole"), SPEC)
    world.order("flow", "awake")
    trainer = InProcess(world)
    go_on(world, world.await_version(VersionId(0, 0)).version, 0)
    trainer.stop()
    return weights(world, VersionId(0, UPDATES))


def check(world: World, epoch: int, expected: str) -> None:
    """What must hold at the end, whatever happened before."""
    assert weights(world, VersionId(epoch, UPDATES)) == expected
    counts = world.ledger.counts()
    assert counts["trained"] == counts["submitted"] == UPDATES * 4
    assert world.ledger.sample(0.0).holds
    assert world.bus.length(TRAJECTORIES.at(world.job)) == 0
    assert world.bus.hlen(REWARDS.at(world.job)) == 0
    folder = world.folder / "segments"
    assert segments.updates(folder) == list(range(1, UPDATES + 1))
    seen = Counter(
        row.trajectory.trajectory
        for update in segments.updates(folder)
        for row in segments.read(segments.segment_path(folder, update)).rows
    )
    assert len(seen) == UPDATES * 4
    assert set(seen.values()) == {1}
    assert [m.update for m in world.metrics()] == list(range(1, UPDATES + 1))
    assert len(set(world.versions())) == len(world.versions())
    assert world.versions() == sorted(world.versions())


POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "before the segment": (segments, "write_new", 3, False),
    "after the segment": (segments, "write_new", 3, True),
    "before the ledger knows": (Ledger, "trained", 3, False),
    "after the ledger knows": (Ledger, "trained", 3, True),
    "after the export": (TorchEngine, "export", 4, True),
    "after the minting": (Mint, "mint", 4, True),
    "before the checkpoint": (Checkpoints, "save", 2, False),
    "after the checkpoint": (Checkpoints, "save", 2, True),
    "after forgetting": (Ledger, "forget", 2, True),
}
"""Where it dies: owner, function, in which call, and whether that call is done first."""


def die(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, after: bool) -> None:
    """Let the trainer die in the `call`-th call of a function; later calls are as always."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Killed
        result = real(*args, **kwargs)
        if calls == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, dying)


def await_version_or_death(world: World, trainer: InProcess, version: VersionId) -> None:
    wait_until(lambda: trainer.died() or version in world.versions(), 30, f"{version} or death")


@pytest.mark.parametrize("point", POINTS)
def test_weights_after_a_death_equal_those_of_an_undisturbed_run(
    redis_url: str,
    job: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: str,
    point: str,
) -> None:
    world = World(redis_url, job, tmp_path, SPEC)
    world.order("flow", "awake")
    die(monkeypatch, *POINTS[point])
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    fed = 0
    while not trainer.died():
        world.feed(2, fed)
        fed += 1
        await_version_or_death(world, trainer, VersionId(0, fed))
        if fed == UPDATES:
            wait_until(trainer.died, 30, "death")
    trainer.forget()
    second = InProcess(world)
    held = wait_until(lambda: [v for v in world.versions() if v.epoch == 1], 30, "the new epoch")[0]
    assert held.number in (fed - 1, fed)
    go_on(world, held, fed)
    second.stop()
    check(world, 1, uninterrupted)


def test_a_killed_process_resumes_where_it_was(
    redis_url: str, job: str, tmp_path: Path, uninterrupted: str
) -> None:
    world = World(redis_url, job, tmp_path, SPEC)
    world.order("flow", "awake")
    first = Process(world)
    world.await_version(VersionId(0, 0))
    for number in range(3):
        world.feed(2, number)
        world.await_version(VersionId(0, number + 1))
    first.kill()
    world.feed(2, 3)
    second = Process(world)
    held = world.await_version(VersionId(1, 3))
    assert held.parent == VersionId(0, 3)
    assert held.files == next(m.files for m in world.minted() if m.version == VersionId(0, 3))
    go_on(world, held.version, 4)
    assert "1 repeated" in second.stop()
    check(world, 1, uninterrupted)


def test_a_broken_checkpoint_is_passed_over_and_its_updates_repeated(
    redis_url: str, job: str, tmp_path: Path, uninterrupted: str
) -> None:
    world = World(redis_url, job, tmp_path, SPEC)
    world.order("flow", "awake")
    first = InProcess(world)
    world.await_version(VersionId(0, 0))
    for number in range(4):
        world.feed(2, number)
        world.await_version(VersionId(0, number + 1))
    wait_until((world.folder / "checkpoints" / "update-000004").is_dir, 20, "a checkpoint")
    first.stop()
    shard = world.folder / "checkpoints" / "update-000004" / "weights.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    second = InProcess(world)
    held = world.await_version(VersionId(1, 4))
    go_on(world, held.version, 4)
    second.stop()
    check(world, 1, uninterrupted)


def test_segments_alone_bring_a_trainer_back(
    redis_url: str, job: str, tmp_path: Path, uninterrupted: str
) -> None:
    spec = spec_of(
        schedule={"updates": UPDATES, "max_lag": 4},
        optimizer={"lr": 0.01, "warmup": 3},
        checkpoint={"every": 100},
    )
    world = World(redis_url, job, tmp_path, spec)
    world.order("flow", "awake")
    first = InProcess(world)
    world.await_version(VersionId(0, 0))
    for number in range(3):
        world.feed(2, number)
        world.await_version(VersionId(0, number + 1))
    first.stop()
    second = InProcess(world)
    held = world.await_version(VersionId(1, 3))
    go_on(world, held.version, 3)
    second.stop()
    check(world, 1, uninterrupted)


def test_a_restart_after_the_end_says_so_again(redis_url: str, job: str, tmp_path: Path) -> None:
    world = World(redis_url, job, tmp_path, SPEC)
    world.order("flow", "awake")
    first = InProcess(world)
    go_on(world, world.await_version(VersionId(0, 0)).version, 0)
    first.stop()
    second = InProcess(world)
    world.await_version(VersionId(1, UPDATES))
    wait_until(
        lambda: sum(isinstance(e, events.Finished) for e in world.said()) == 2, 20, "finished once more"
    )
    second.stop()
    assert weights(world, VersionId(1, UPDATES)) == weights(world, VersionId(0, UPDATES))


def test_another_spec_s_checkpoint_stops_the_job(redis_url: str, job: str, tmp_path: Path) -> None:
    world = World(redis_url, job, tmp_path, SPEC)
    world.order("flow", "awake")
    first = InProcess(world)
    go_on(world, world.await_version(VersionId(0, 0)).version, 0)
    first.stop()
    other = spec_of(schedule={"updates": 9}, optimizer={"lr": 0.02})
    (world.folder / "spec.json").write_text(other.model_dump_json())
    second = InProcess(world)
    wait_until(lambda: second.error, 20, "the refusal")
    with pytest.raises(ValueError, match="update-000005 belongs to spec"):
        second.stop()


LEDGER = (HELD, ENTRIES, COUNTS, GROUPS, READY, CLAIMS, REWARDS)


@pytest.mark.parametrize("restart", [False, True])
def test_a_ledger_that_lost_its_last_second_trains_nothing_twice(
    redis_url: str, job: str, tmp_path: Path, uninterrupted: str, restart: bool
) -> None:
    world = World(redis_url, job, tmp_path, SPEC)
    world.order("train", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    world.feed(2)
    before = {key.at(job): world.bus.many([("DUMP", key.at(job))])[0] for key in LEDGER}
    world.order("flow", "awake")
    world.await_version(VersionId(0, 1))
    stopped = world.order("sync", "awake")
    wait_until(
        lambda: any(isinstance(e, events.Woke) and e.seq == stopped for e in world.said()), 20, "a halt"
    )
    if restart:
        trainer.stop()
    for key, dump in before.items():
        world.bus.delete(key)
        if dump is not None:
            world.bus.many([("RESTORE", key, 0, dump)])
    assert world.ledger.counts()["trained"] == 0
    if restart:
        trainer = InProcess(world)
        world.await_version(VersionId(1, 1))
    world.order("flow", "awake")
    epoch = 1 if restart else 0
    go_on(world, VersionId(epoch, 1), 1)
    trainer.stop()
    check(world, epoch, uninterrupted)

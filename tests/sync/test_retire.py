"""What an overtaken sync process may still do to the store: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import true_weights
from true_world import World, clock_of_histories

from syncline.contract.streams import JOB, LOCK, PINS
from syncline.contract.version_path import VersionId
from syncline.runtime.lease import LeaseLost
from syncline.runtime.store import BlobStore


def test_a_sync_that_was_overtaken_deletes_nothing(redis_url: str, job: str, tmp_path: Path) -> None:
    models = true_weights.model_root(tmp_path / "models")
    with clock_of_histories() as clock:
        world = World(redis_url, job, tmp_path / "runs", models, clock, "disjoint")
        store = BlobStore(world.run / "store")
        for number in range(2):
            world.mint(VersionId(0, number), number, canary=False, damaged=False)
            world.sync_turn()
        world.mint(VersionId(0, 2), 2, canary=False, damaged=False)
        control = world.control
        assert control is not None
        control.take_minted()
        control.publish()
        held = [VersionId(0, number) for number in range(3)]
        assert store.manifests() == held, "the third goes beyond retention, and nothing is retired yet"

        world.bus.set(LOCK.at(f"{job}/sync"), b"another process")
        with pytest.raises(LeaseLost):
            control.retire()
        assert store.manifests() == held

        world.bus.delete(LOCK.at(f"{job}/sync"))
        world.control = None
        world.sync_turn()
        assert store.manifests() == held[1:], "the process that holds the lease retires it"
        world.close()


def test_a_version_that_an_evaluation_waits_for_is_kept_until_that_has_ended(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    models = true_weights.model_root(tmp_path / "models")
    with clock_of_histories() as clock:
        world = World(redis_url, job, tmp_path / "runs", models, clock, "disjoint")
        store = BlobStore(world.run / "store")
        world.mint(VersionId(0, 0), 0, canary=False, damaged=False)
        world.sync_turn()
        waiting = f"{job}e"
        world.bus.hset(JOB.at(waiting), "state", "queued")
        world.bus.hset(PINS.at(job), {waiting: "0.0", "unknown": "0.1"})
        for number in range(1, 4):
            world.mint(VersionId(0, number), number, canary=False, damaged=False)
            world.sync_turn()
        assert store.manifests() == [VersionId(0, 0), VersionId(0, 2), VersionId(0, 3)]
        world.bus.hset(JOB.at(waiting), "state", "succeeded")
        world.sync_turn()
        assert store.manifests() == [VersionId(0, 2), VersionId(0, 3)]
        assert world.bus.hgetall(PINS.at(job)) == {}
        world.close()

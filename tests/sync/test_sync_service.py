"""Sync as a process, with a real Redis, a real store and workers that speak the protocol."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from exports import minted, write
from msgspec.structs import replace
from scripted import Installation, ScriptedWorker
from waiting import wait_until

from syncline.contract.events import Active, SyncFailed
from syncline.contract.streams import ACKS, DEAD, MINTED, VERSIONS
from syncline.contract.version_path import Ack, VersionId


@pytest.fixture
def place(redis_url: str, job: str, tmp_path: Path) -> Iterator[Installation]:
    place = Installation(redis_url, job, tmp_path)
    yield place
    place.stop()


def mint(place: Installation, number: int, seed: int | None = None, epoch: int = 0) -> VersionId:
    version = VersionId(epoch, number)
    message = minted(place.job, place.run, version, number if seed is None else seed)
    place.bus.append(MINTED.at(place.job), message)
    return version


def actives(place: Installation) -> list[VersionId]:
    return [event.version for event in place.events() if isinstance(event, Active)]


def settled(place: Installation, version: VersionId, workers: list[ScriptedWorker]) -> None:
    wait_until(
        lambda: place.state_of(version) == "active" and all(w.active == version for w in workers),
        60,
        f"version {version} on all workers",
    )


def test_versions_go_from_minted_to_active_and_old_ones_retire(place: Installation) -> None:
    place.phase("colocated", "awake")
    process = place.start()
    workers = [ScriptedWorker(place, name).start() for name in ("w0", "w1")]
    for number in range(4):
        settled(place, mint(place, number), workers)
    assert [w.history for w in workers] == [[VersionId(0, n) for n in range(4)]] * 2
    assert [w.errors for w in workers] == [[], []]
    assert actives(place) == [VersionId(0, n) for n in range(4)]
    wait_until(lambda: place.state_of(VersionId(0, 1)) == "retired", 30, "retirement of 0.1")
    assert place.store.manifests() == [VersionId(0, 2), VersionId(0, 3)]
    assert len(list((place.run / "store" / "blobs").iterdir())) == 6
    assert list((place.run / "export").iterdir()) == []
    assert place.bus.hget(VERSIONS.at(place.job), "latest") == b"0.3"
    record = place.record(VersionId(0, 3))
    assert record is not None
    assert record.published is not None
    assert record.active is not None
    assert {w.name: record.workers[w.name].verdict for w in workers} == {"w0": "verified", "w1": "verified"}
    # a barrier: each version's only commit order names both workers
    assert [o.workers for o in place.orders() if o.order == "commit"] == [("w0", "w1")] * 4
    assert [o.seq for o in place.orders()] == list(range(len(place.orders())))
    assert psutil.Process(process.pid).memory_info().rss < 150e6
    assert place.stop() == 0
    for worker in workers:
        worker.stop()
    hops = sqlite3.connect(place.run.parent / "traces.sqlite").execute("select name from spans").fetchall()
    assert sorted({name for (name,) in hops}) == ["version.converted", "version.published", "version.retired"]


def test_identical_bytes_are_stored_once_and_unchanged(place: Installation) -> None:
    place.phase("disjoint", "awake")
    place.start()
    worker = ScriptedWorker(place, "w0").start()
    settled(place, mint(place, 0, seed=5), [worker])
    settled(place, mint(place, 1, seed=5), [worker])
    record = place.record(VersionId(0, 1))
    assert record is not None
    assert record.new_bytes == 0
    assert record.workers["w0"].verdict == "verified, unchanged"
    worker.stop()


def test_a_worker_that_reads_other_bytes_never_serves(place: Installation) -> None:
    def lie(ack: Ack) -> Ack:
        return replace(ack, loaded_digest="0" * 64) if ack.kind == "verified" else ack

    place.phase("colocated", "awake")
    place.start()
    good, bad = ScriptedWorker(place, "w0").start(), ScriptedWorker(place, "w1", lie).start()
    version = mint(place, 0)
    settled(place, version, [good])
    assert bad.history == []
    record = place.record(version)
    assert record is not None
    assert record.workers["w1"].reason.startswith("loaded digest 0000")
    good.stop()
    bad.stop()


def test_rolling_does_not_wait_for_a_silent_worker(place: Installation) -> None:
    place.phase("disjoint", "awake")
    place.start()
    quick = ScriptedWorker(place, "w0").start()
    silent = ScriptedWorker(place, "w1", lambda ack: ack if ack.kind == "joined" else None).start()
    for number in range(2):
        settled(place, mint(place, number), [quick])
    assert silent.history == []
    quick.stop()
    silent.stop()


def test_a_late_worker_and_a_new_process_get_the_newest(place: Installation) -> None:
    place.phase("colocated", "awake")
    place.start()
    first = ScriptedWorker(place, "w0").start()
    version = mint(place, 0)
    settled(place, version, [first])
    late = ScriptedWorker(place, "w1").start()
    settled(place, version, [late])
    first.stop()
    again = ScriptedWorker(place, "w0").start()
    settled(place, version, [again])
    assert actives(place) == [version]
    late.stop()
    again.stop()


def test_a_weight_that_is_no_number_fails_the_version(place: Installation) -> None:
    place.phase("colocated", "awake")
    place.start()
    version = VersionId(0, 0)
    message = minted(place.job, place.run, version, 0)
    files = write(place.run / message.artefact, {"model.w": np.array([1, np.nan], "<f4")})
    place.bus.append(MINTED.at(place.job), replace(message, files=files))
    wait_until(lambda: place.state_of(version) == "failed", 30, "failure")
    failures = [event for event in place.events() if isinstance(event, SyncFailed)]
    assert [f.version for f in failures] == [version]
    assert "tensor model.w is nan at flat index 1" in failures[0].reason


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"contract": "other"}, "minted under contract other"),
        ({"artefact": "../elsewhere"}, "no folder below export/"),
        ({"files": {"model.safetensors": "0" * 64}}, "has sha256"),
    ],
)
def test_what_the_trainer_did_not_stamp_is_refused(
    place: Installation, change: dict[str, object], says: str
) -> None:
    place.start()
    message = replace(minted(place.job, place.run, VersionId(0, 0), 0), **change)
    place.bus.append(MINTED.at(place.job), message)
    wait_until(lambda: place.state_of(VersionId(0, 0)) == "failed", 30, "failure")
    assert [says in event.reason for event in place.events() if isinstance(event, SyncFailed)] == [True]


def test_older_versions_and_garbage_are_set_aside(place: Installation) -> None:
    place.phase("disjoint", "awake")
    place.start()
    worker = ScriptedWorker(place, "w0").start()
    settled(place, mint(place, 5, epoch=1), [worker])
    mint(place, 9, epoch=0)
    place.bus.append(ACKS.at(place.job), {b"m": b"\xff"})
    place.bus.append(MINTED.at(place.job), {b"x": b"1"})
    settled(place, mint(place, 6, epoch=1), [worker])
    assert worker.history == [VersionId(1, 5), VersionId(1, 6)]
    assert place.state_of(VersionId(0, 9)) == "retired"
    assert place.bus.length(DEAD.at(place.job)) == 2
    worker.stop()


def test_asleep_workers_are_left_alone(place: Installation) -> None:
    place.phase("colocated", "asleep")
    place.start()
    worker = ScriptedWorker(place, "w0").start()
    version = mint(place, 0)
    wait_until(lambda: place.state_of(version) == "published", 30, "publication")
    assert place.orders() == []
    place.phase("colocated", "awake")
    settled(place, version, [worker])
    worker.stop()


def test_a_version_that_nobody_can_take_fails_in_time(redis_url: str, job: str, tmp_path: Path) -> None:
    place = Installation(redis_url, job, tmp_path, wait=2.0)
    place.phase("colocated", "awake")
    place.start()
    worker = ScriptedWorker(place, "w0", lambda ack: ack if ack.kind == "joined" else None).start()
    version = mint(place, 0)
    wait_until(lambda: place.state_of(version) == "failed", 30, "failure")
    assert [e.version for e in place.events() if isinstance(e, SyncFailed)] == [version]
    worker.stop()
    place.stop()


@pytest.mark.parametrize("moment", ["minted", "published", "staged", "verified", "committed", "active"])
def test_killed_at_any_moment_it_converges(place: Installation, moment: str) -> None:
    """kill -9 once the moment is visible from outside; the next process brings both versions home."""
    gate: list[Ack] = []

    def hold(ack: Ack) -> Ack | None:
        """Keep back what would lead beyond the moment, until sync is dead."""
        if not released and (ack.kind, moment) in {
            ("staged", "published"),
            ("verified", "published"),
            ("verified", "staged"),
            ("active", "committed"),
        }:
            gate.append(ack)
            return None
        return ack

    released: list[bool] = []
    place.phase("colocated", "awake")
    place.start()
    workers = [ScriptedWorker(place, name, hold).start() for name in ("w0", "w1")]
    first = mint(place, 0)

    def reached() -> bool:
        record = place.record(first)
        if record is None:
            return False
        paths = record.workers.values()
        seen = {
            "minted": True,
            "published": record.published is not None,
            "staged": len(record.workers) == 2 and all(p.staged is not None for p in paths),
            "verified": any(p.verified is not None for p in paths),
            "committed": any(o.order == "commit" for o in place.orders()),
            "active": record.state == "active",
        }
        return seen[moment]

    wait_until(reached, 60, moment)
    place.kill()
    second = mint(place, 1)
    released.append(True)
    for ack in gate:  # late answers to the dead process's orders: they must change nothing
        place.bus.append(ACKS.at(place.job), ack)
    place.start()
    settled(place, second, workers)
    assert [w.errors for w in workers] == [[], []]
    assert all(w.history == sorted(w.history) for w in workers)
    assert place.state_of(first) in ("active", "retired")
    seqs = [order.seq for order in place.orders()]
    assert seqs == list(range(len(seqs)))
    assert actives(place).count(second) == 1
    for worker in workers:
        worker.stop()


def test_killed_while_converting_it_repeats_to_the_same_bytes(place: Installation) -> None:
    """Half a version's blobs and no manifest: the next process ends with the same manifest and no leftovers."""
    place.phase("disjoint", "awake")
    version = mint(place, 0)
    place.store.put(b"half of a dead process's work")
    place.start()
    wait_until(lambda: place.state_of(version) == "published", 30, "publication")
    wait_until(lambda: len(list((place.run / "store" / "blobs").iterdir())) == 3, 30, "leftovers gone")
    once = place.store.read_manifest(version)
    place.kill()
    place.start()
    worker = ScriptedWorker(place, "w0").start()
    settled(place, version, [worker])
    assert place.store.read_manifest(version) == once
    worker.stop()


def test_a_second_process_waits_for_the_lease(place: Installation) -> None:
    place.phase("disjoint", "awake")
    place.start()
    worker = ScriptedWorker(place, "w0").start()
    settled(place, mint(place, 0), [worker])
    other = Installation.__new__(Installation)
    other.__dict__.update(place.__dict__)
    second = other.start()
    log = place.run / "sync.log"
    wait_until(lambda: log.read_text().count("up: incarnation") == 2, 30, "start of the second process")
    settled(place, mint(place, 1), [worker])
    assert second.poll() is None
    second.terminate()
    assert second.wait(30) == 0
    worker.stop()

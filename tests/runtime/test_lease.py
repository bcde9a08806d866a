"""Leases on a real server: one writer, and never more memory than the device has."""

from __future__ import annotations

import secrets
import threading
import time

import pytest
from waiting import wait_until

from syncline.contract.events import Heartbeat
from syncline.contract.streams import HEARTBEAT, PREFIX
from syncline.runtime import lease as lease_module
from syncline.runtime.bus import Bus, pack
from syncline.runtime.lease import DeviceLease, Devices, Lease, LeaseLost, LeaseNotGiven


@pytest.fixture
def bus(redis_url: str) -> Bus:
    return Bus(redis_url)


def test_one_holder_at_a_time(bus: Bus, job: str) -> None:
    first, second = Lease(bus, f"{job}/x", "one"), Lease(bus, f"{job}/x", "two")
    assert first.try_acquire()
    assert first.try_acquire()
    assert not second.try_acquire()
    assert first.held()
    second.release()
    assert first.held()
    first.release()
    assert second.try_acquire()
    with pytest.raises(LeaseLost, match=f"lease {job}/x of one is held by two"):
        first.renew()


def test_a_lease_runs_out_and_is_not_taken_back_in_silence(bus: Bus, job: str) -> None:
    brief = Lease(bus, f"{job}/x", "one", seconds=0.05)
    assert brief.try_acquire()
    wait_until(lambda: not brief.held(), 5, "the lease ran out")
    with pytest.raises(LeaseLost, match="held by nobody"):
        brief.renew()


def test_renewal_goes_on_until_the_end(bus: Bus, job: str) -> None:
    held = Lease(bus, f"{job}/x", "one", seconds=0.3)
    held.acquire(threading.Event())
    ended = threading.Event()
    thread = threading.Thread(target=lambda: held.renew_until(ended))
    thread.start()
    other = Lease(bus, f"{job}/x", "two", seconds=0.3)
    until = time.monotonic() + 1.0
    wait_until(lambda: time.monotonic() > until or other.try_acquire(), 5, "a second passed")
    assert held.held()
    ended.set()
    thread.join()
    wait_until(other.try_acquire, 5, "the other got it once nobody renewed")


def test_waiting_for_a_lease_ends_with_the_process(bus: Bus, job: str) -> None:
    assert Lease(bus, f"{job}/x", "one").try_acquire()
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(LeaseNotGiven, match="told to stop"):
        Lease(bus, f"{job}/x", "two").acquire(stopping)


def test_a_transaction_writes_only_under_the_lease(bus: Bus, job: str) -> None:
    mine, theirs = Lease(bus, f"{job}/x", "one"), Lease(bus, f"{job}/x", "two")
    key = f"{PREFIX}:{{{job}}}:lease"
    with pytest.raises(LeaseLost):
        mine.transact([("SET", key, "a")])
    assert bus.get(key) is None
    assert mine.try_acquire()
    raw = bytes(range(256))
    assert mine.transact([("SET", key, raw), ("INCRBY", key + "n", 2), ("GET", key)])[1:] == [2, raw]
    mine.release()
    theirs.try_acquire()
    with pytest.raises(LeaseLost, match="must not write any more"):
        mine.transact([("SET", key, "b")])
    assert bus.get(key) == raw


# ---- devices --------------------------------------------------------------------------------------------------
def process(bus: Bus, name: str, alive: bool = True, incarnation: str | None = None) -> Devices:
    """The leases of a process, with a heartbeat if it is alive."""
    incarnation = incarnation or secrets.token_hex(4)
    key = HEARTBEAT.at(name)
    if alive:
        beat = Heartbeat(
            service="s",
            name=name,
            incarnation=incarnation,
            pid=1,
            port=None,
            ready=True,
            why="",
            at=0.0,
        )
        bus.set(key, pack(beat), ttl=60)
    return Devices(bus, key, incarnation)


def test_the_budget_is_never_exceeded(bus: Bus, job: str) -> None:
    rollout, trainer = process(bus, f"{job}/rollout/w0"), process(bus, f"{job}/trainer/trainer")
    assert rollout.acquire(job, "w0", 60, 100)
    assert not trainer.acquire(job, "trainer", 50, 100)
    assert rollout.acquire(job, "w0", 40, 100)
    assert trainer.acquire(job, "trainer", 50, 100)
    assert not rollout.acquire(job, "w0", 51, 100)
    assert {name: held.nbytes for name, held in trainer.holders(job).items()} == {"w0": 40, "trainer": 50}
    assert rollout.release(job, "w0")
    assert not rollout.release(job, "w0")
    assert trainer.acquire(job, "trainer", 100, 100)
    with pytest.raises(ValueError, match="asks for 101 bytes of a budget of 100"):
        trainer.acquire(job, "trainer", 101, 100)


def test_the_next_incarnation_is_not_blocked_by_the_last(bus: Bus, job: str) -> None:
    name = f"{job}/rollout/w0"
    dead = process(bus, name)
    assert dead.acquire(job, "old-w0", 100, 100)
    again = process(bus, name)
    assert again.acquire(job, "w0", 100, 100)
    assert set(again.holders(job)) == {"w0"}


def test_a_late_heartbeat_does_not_cost_a_living_process_its_memory(
    bus: Bus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "SILENCE", 0.5)
    name = f"{job}/rollout/w0"
    busy = process(bus, name, alive=False, incarnation="i1")
    waiter = process(bus, f"{job}/trainer/trainer")
    assert busy.acquire(job, "w0", 100, 100)
    assert not waiter.acquire(job, "trainer", 100, 100)
    process(bus, name, incarnation="i1")
    until = time.monotonic() + 0.7
    wait_until(lambda: time.monotonic() > until or waiter.acquire(job, "trainer", 100, 100), 5, "time passed")
    assert set(waiter.holders(job)) == {"w0"}
    bus.delete(HEARTBEAT.at(name))
    wait_until(lambda: waiter.acquire(job, "trainer", 100, 100), 5, "the dead one's memory came free")
    assert waiter.holders(job)["trainer"].nbytes == 100


def test_many_processes_at_once_keep_the_budget(bus: Bus, job: str) -> None:
    devices = [process(bus, f"{job}/rollout/w{n}") for n in range(8)]
    given: list[int] = []

    def ask(n: int) -> None:
        if devices[n].acquire(job, f"w{n}", 30, 100):
            given.append(n)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 3
    assert set(devices[0].holders(job)) == {f"w{n}" for n in given}


def test_a_lease_names_a_real_heartbeat(bus: Bus) -> None:
    with pytest.raises(ValueError, match="'j1/rollout/w0' is no heartbeat key"):
        Devices(bus, "j1/rollout/w0", "i")
    assert DeviceLease(1, "k", "i").nbytes == 1

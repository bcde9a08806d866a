"""Faults on the whole stack: real processes, a real Redis behind a proxy, a run root on a disk that can be full.

A seed decides which fault comes when. Between two faults the job must make an update, within `DEADLINE`; once a
second everything that must always hold is looked at.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guarantees import check
from own_redis import OwnRedis
from proxy import Proxy
from specs import spec
from stack import TERMINAL, Stack
from tally import Failure, Recorded
from waiting import wait_until

from syncline.runtime.bus import Bus
from syncline.runtime.ledger_view import LedgerView

DEADLINE = 180.0  # seconds for an update after a fault
DISK = "400m"
SERVICES = ("gateway", "w0", "w1", "errands", "scheduler", "trainer", "sync")


@dataclass
class Storm:
    """A stack in bad weather. `disk`: its run root is a file system of its own."""

    clock: bool = False
    disk: bool = False
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.redis = OwnRedis()
        self.proxy = Proxy(self.redis.folder / "s")
        self.runs = Path(tempfile.mkdtemp(prefix="sl-"))
        if self.disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "syncline", self.runs], check=True)
        env = {"SYNCLINE_REDIS_URL": self.proxy.url}
        self.offset = self.redis.folder / "clock"
        if self.clock:
            self.set_clock(0)
            seam = self.redis.folder / "seam"
            seam.mkdir()
            shutil.copy(Path(__file__).with_name("turned_clock.py"), seam / "sitecustomize.py")
            env |= {"PYTHONPATH": str(seam), "PYTHON_CLOCK_FILE": str(self.offset)}
        self.stack = Stack(self.runs, env)
        self.bus = Bus(self.redis.url, deadline=60.0)  # past the proxy: the observer is not in the weather
        self.job = ""
        self._looked, self._update = 0.0, 0

    def start(self, mode: str, updates: int) -> None:
        self.stack.up()
        limits = {"worker_idle": 5.0}
        self.job = self.stack.submit(spec(schedule={"mode": mode, "updates": updates}, limits=limits))
        self.wait_update(1)

    def set_clock(self, offset: int) -> None:
        new = self.offset.with_suffix(".new")
        new.write_text(f"{offset:+d}\n")
        new.replace(self.offset)

    # ---- looking --------------------------------------------------------------------------------------------
    def invariants(self) -> None:
        """At most once a second: what must hold at any moment."""
        if time.monotonic() < self._looked + 1.0:
            return
        self._looked = time.monotonic()
        sample = LedgerView(self.bus, self.job).sample(0.0)
        assert sample.holds, f"the conservation law is broken: {sample}"

    def status(self) -> dict[str, Any]:
        status = self.stack.status(self.job)
        assert status["state"] not in TERMINAL - {"succeeded"}, f"{status['state']}: {status['reason']}"
        assert int(status["update"]) >= self._update, f"from update {self._update} back to {status['update']}"
        self._update = int(status["update"])
        return status

    def wait_update(self, update: int) -> None:
        def there() -> bool:
            self.invariants()
            status = self.status()
            return status["state"] == "succeeded" or int(status["update"]) >= update

        wait_until(there, DEADLINE, f"update {update} after {self.log[-1:]}", every=0.2)

    def let_pass(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        wait_until(lambda: time.monotonic() >= end, seconds + 5, "time to pass", every=0.1)

    def finish(self, updates: int) -> None:
        def ended() -> bool:
            self.invariants()
            return bool(self.status()["state"] == "succeeded")

        wait_until(ended, DEADLINE, "the end of the job", every=0.3)
        check(self.runs / self.job, self.stack.summary(self.job), updates, max_lag=1)

    def close(self) -> None:
        self.proxy.heal()
        try:
            self.stack.down()
        finally:
            self.bus.close()
            self.proxy.close()
            self.redis.remove()
            if self.disk:
                subprocess.run(["umount", "-l", self.runs], check=True)
            shutil.rmtree(self.runs, ignore_errors=True)


# ---- faults -------------------------------------------------------------------------------------------------
Fault = Callable[[Storm, random.Random], None]


def kill(name: str) -> Fault:
    def do(storm: Storm, drawn: random.Random) -> None:
        storm.stack.kill(name)

    return do


def pause(name: str, least: float, most: float) -> Fault:
    """SIGSTOP for a while. A process that was replaced meanwhile wakes beside its successor."""

    def do(storm: Storm, drawn: random.Random) -> None:
        pid = wait_until(lambda: storm.stack.pid(name), 60, f"a process {name}")
        os.kill(pid, signal.SIGSTOP)
        try:
            storm.let_pass(drawn.uniform(least, most))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return do


def partition(storm: Storm, drawn: random.Random) -> None:
    storm.proxy.severed = True
    storm.let_pass(drawn.uniform(2.0, 8.0))
    storm.proxy.heal()


def refuse(storm: Storm, drawn: random.Random) -> None:
    storm.proxy.refusing = True
    storm.proxy.reset()
    storm.let_pass(drawn.uniform(1.0, 6.0))
    storm.proxy.heal()


def slow(storm: Storm, drawn: random.Random) -> None:
    storm.proxy.delay = drawn.uniform(0.02, 0.2)
    storm.let_pass(4.0)
    storm.proxy.heal()


def reset(storm: Storm, drawn: random.Random) -> None:
    storm.proxy.reset()


def redis_dies(storm: Storm, drawn: random.Random) -> None:
    storm.redis.kill()
    storm.let_pass(drawn.uniform(0.0, 3.0))
    storm.redis.start()


def redis_is_full(storm: Storm, drawn: random.Random) -> None:
    storm.bus.call("CONFIG", "SET", "maxmemory", 1)
    storm.let_pass(drawn.uniform(1.0, 4.0))
    storm.bus.call("CONFIG", "SET", "maxmemory", 0)


def disk_is_full(storm: Storm, drawn: random.Random) -> None:
    filler = storm.runs / "filler"
    try:
        with filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError:
        pass
    storm.let_pass(drawn.uniform(2.0, 6.0))
    filler.unlink()


def clock_jumps(seconds: int) -> Fault:
    def do(storm: Storm, drawn: random.Random) -> None:
        storm.set_clock(seconds)
        storm.let_pass(3.0)

    return do


FAULTS: dict[str, Fault] = {
    **{f"kill -9 of {name}": kill(name) for name in SERVICES},
    **{f"{name} is paused": pause(name, 1.0, 6.0) for name in SERVICES},
    "trainer is paused for longer than its lease": pause("trainer", 11.0, 13.0),
    "scheduler is paused for longer than its lease": pause("scheduler", 11.0, 13.0),
    "Redis is partitioned off": partition,
    "Redis refuses connections": refuse,
    "Redis is slow": slow,
    "connections to Redis are reset": reset,
    "Redis is killed": redis_dies,
    "Redis is out of memory": redis_is_full,
}
DISK_FAULTS: dict[str, Fault] = {"the disk is full": disk_is_full}
CLOCK_FAULTS: dict[str, Fault] = {
    "the clock jumps an hour ahead": clock_jumps(3600),
    "the clock jumps an hour back": clock_jumps(-3600),
}
LEVEL = "whole stack"


def may_mount() -> bool:
    """Whether a small file system can be mounted: the full disk needs one."""
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
        if tried.returncode == 0:
            subprocess.run(["umount", folder], check=True)
    return tried.returncode == 0


def schedule(seed: int, count: int, faults: dict[str, Fault]) -> list[str]:
    """Which faults come, in order: each once before any comes twice."""
    drawn = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += drawn.sample(sorted(faults), len(faults))
    return order[:count]


def campaign(seed: int, recorded: Recorded, count: int = 10) -> None:
    """One job in one storm, written into `recorded`."""
    kinds = [FAULTS, FAULTS, DISK_FAULTS if may_mount() else FAULTS, CLOCK_FAULTS]
    faults = kinds[seed % len(kinds)]
    count = count if faults is FAULTS else 4
    try:
        weather(seed, schedule(seed, count, faults), faults, recorded)
    except AssertionError as error:
        case = f"storm: {', '.join(schedule(seed, count, faults))}"
        recorded.failures.append(Failure(case=case, seed=seed, story=str(error)[-300:]))


def weather(seed: int, order: list[str], faults: dict[str, Fault], recorded: Recorded) -> None:
    """Carry out `order` on a job of its own; raises `AssertionError` with what did not hold."""
    drawn = random.Random(seed)
    updates = 3 * (len(order) + 1)
    storm = Storm(clock=faults is CLOCK_FAULTS, disk=faults is DISK_FAULTS)
    rows = [recorded.row(LEVEL, name) for name in order]
    try:
        storm.start(drawn.choice(["colocated", "disjoint"]), updates)
        for name, row in zip(order, rows, strict=True):
            storm.log.append(name)
            row.injections += 1
            update = int(storm.status()["update"])
            began = time.monotonic()
            faults[name](storm, drawn)
            storm.wait_update(update + 1)
            row.recovery.append(time.monotonic() - began)
        storm.finish(updates)
        for row in rows:
            row.survived += 1
    finally:
        storm.close()

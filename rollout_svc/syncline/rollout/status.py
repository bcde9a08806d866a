"""What a worker says of itself twice a second, and the pace that it is asked to keep."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Literal

from syncline.contract.events import WorkerStatus
from syncline.contract.streams import CLAIMS, WORKERS
from syncline.rollout.engine import RolloutEngine
from syncline.rollout.intake import Intake
from syncline.rollout.orders import Orders
from syncline.rollout.residence import Residence, resident
from syncline.runtime.bus import Bus, pack

PERIOD = 0.5  # seconds between two statuses
_WINDOW = 2.0  # seconds over which tokens per second are counted


class Teller:
    """Writes `WorkerStatus`."""

    def __init__(
        self,
        bus: Bus,
        engine: RolloutEngine,
        intake: Intake,
        orders: Orders,
        residence: Residence,
        *,
        job: str,
        name: str,
        incarnation: str,
        max_lag: int,
    ) -> None:
        self._claims, self._max_lag, self._claimed = CLAIMS.at(job), max_lag, -1
        self._bus, self._engine, self._intake = bus, engine, intake
        self._orders, self._residence = orders, residence
        self._key, self._name, self._incarnation = WORKERS.at(job), name, incarnation
        self._told = float("-inf")
        self._seen, self._ran, self._busy = time.monotonic(), False, 0.0
        self._counts: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def tell(self, now_at_once: bool = False) -> None:
        """Write the status if it is due. Called once per turn of the loop: a turn that began with requests was busy."""
        now = time.monotonic()
        self._busy += now - self._seen if self._ran else 0.0
        self._seen, self._ran = now, self._engine.running > 0
        if now < self._told + PERIOD and not now_at_once:
            return
        self._told = now
        self._claimed = int(self._bus.hget(self._claims, "version") or -1)
        self._bus.hset(self._key, self._name, pack(self.status()))

    def status(self) -> WorkerStatus:
        """This worker as it sees itself."""
        serving = self._engine.serving
        return WorkerStatus(
            worker=self._name,
            incarnation=self._incarnation,
            state=self._state(),
            version=serving[0] if serving else None,
            digest=serving[1] if serving else "",
            staged=self._engine.staged,
            running=self._engine.running,
            waiting=len(self._intake.waiting),
            tokens=self._engine.sampled,
            tokens_per_second=self._speed(),
            device=self._residence.device,
            resident=resident(),
            why=self.why(),
            at=time.time(),
            busy=self._busy,
        )

    def why(self) -> str:
        """Why this worker takes no work, or what is wrong with the version on offer; "" if nothing."""
        if self._residence.waits_for_device:
            return "waits for the device"
        if not self._residence.awake:
            return "asleep"
        return self._orders.trouble or ("no verified version" if self._engine.serving is None else "")

    def unready(self) -> str:
        """Why a probe finds this worker unready; "" while it holds a verified version inside the bound, or sleeps by
        order. A version is outside once whatever was sampled under it could only be trained over the bound.
        """
        if not self._residence.awake and not self._residence.waits_for_device:
            return ""
        serving = self._engine.serving
        if serving is not None and serving[0].number + self._max_lag <= self._claimed:
            return f"version {serving[0]} is behind the bound: {self._claimed} is trained already"
        return self.why()

    def _state(self) -> Literal["empty", "serving", "draining", "asleep", "out"]:
        if not self._residence.awake:
            return "asleep"
        if self._orders.trouble:
            return "out"
        if self._engine.serving is None:
            return "empty"
        return "draining" if self._orders.committing and self._engine.room == 0 else "serving"

    def _speed(self) -> float:
        now, counts = time.monotonic(), self._counts
        counts.append((now, self._engine.sampled))
        while len(counts) > 2 and counts[1][0] <= now - _WINDOW:
            counts.popleft()
        began, before = counts[0]
        return (self._engine.sampled - before) / (now - began) if now > began else 0.0


class Pace:
    """Slows a worker to a share of its full speed by resting after work.

    share      1: full speed
    stopping   ends a rest
    """

    def __init__(self, share: float, stopping: threading.Event) -> None:
        self._rest_per_second = 1.0 / share - 1.0
        self._stopping = stopping
        self._owed = 0.0

    def worked(self, seconds: float) -> None:
        """Rest in proportion to `seconds` of work."""
        self._owed += seconds * self._rest_per_second
        if self._owed > 0.001:
            rested = time.monotonic()
            self._stopping.wait(self._owed)
            self._owed -= time.monotonic() - rested

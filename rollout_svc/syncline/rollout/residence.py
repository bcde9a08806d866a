"""Where the engine lives: obeying phases. Awake and asleep, the gate, and the device lease that backs them
up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import psutil

from syncline.contract.events import Emptied, Event, Phase, Slept, Woke
from syncline.contract.job import JobSpec
from syncline.contract.streams import PHASE
from syncline.rollout.engine import RolloutEngine
from syncline.rollout.orders import Orders
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.lease import Devices
from syncline.runtime.store import BlobStore, MissingManifest

_LOG = logging.getLogger("syncline.rollout")
_MIB = 1 << 20
_LATELY = 10.0  # seconds after an order to leave in which others look for what is handed back


def resident() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


class Residence:
    """Obeys the newest phase. `awake` says whether the engine may hold memory, `gate` whether work may begin."""

    def __init__(
        self,
        bus: Bus,
        engine: RolloutEngine,
        orders: Orders,
        store: BlobStore,
        devices: Devices,
        spec: JobSpec,
        job: str,
        name: str,
        emit: Callable[[Event], str],
    ) -> None:
        self._bus, self._engine, self._orders, self._store = bus, engine, orders, store
        self._devices, self._job, self._name, self._emit = devices, job, name, emit
        self._budget = spec.device.memory_mb * _MIB
        self._share = self._budget // spec.rollout.most
        self._phase: Phase | None = None
        self._obeyed = -1  # seq of the phase acknowledged last
        self._number = int(name[1:]) if name[1:].isdecimal() else -1
        self._shrank = float("-inf")  # monotonic second at which others were told to leave
        self._emptied = -1  # seq of the phase under which this worker last said that it holds nothing
        self._awake = False
        self.device = ""  # leased now; "" while asleep
        self.waits_for_device = False
        self.baseline = resident()

    @property
    def awake(self) -> bool:
        """Whether the engine is ordered awake and has its device."""
        return self._awake

    @property
    def gate_open(self) -> bool:
        """Whether requests may begin."""
        open_ = self._awake and self._phase is not None and self._phase.gate == "open"
        return open_ and not self.leaves

    @property
    def leaves(self) -> bool:
        """Whether this worker is one too many: it begins nothing and ends what it holds."""
        return self._phase is not None and 0 < self._phase.workers <= self._number

    @property
    def others_leave(self) -> bool:
        """Whether workers were told to leave a short while ago: what they had not begun is handed back."""
        return time.monotonic() < self._shrank + _LATELY

    def say_emptied(self) -> None:
        """This worker leaves and holds nothing: said once under each order."""
        if self._phase is not None and self._phase.seq == self._obeyed > self._emptied:
            self._emptied = self._obeyed
            self._emit(Emptied(who=self._name, seq=self._obeyed))

    @property
    def mode(self) -> str | None:
        """Mode of the phase last obeyed; None before the first."""
        return self._phase.mode if self._phase else None

    def look(self) -> None:
        """Read the phase now wanted: a late starter obeys the same as everybody."""
        raw = self._bus.get(PHASE.at(self._job))
        if raw is not None:
            self.want(unpack(raw, Phase))

    def want(self, phase: Phase) -> None:
        """A phase was ordered. An older one than is known changes nothing."""
        if self._phase is None or phase.seq > self._phase.seq:
            if self._phase is not None and 0 < phase.workers < self._phase.workers:
                self._shrank = time.monotonic()
            self._phase = phase

    def obey(self) -> None:
        """Bring the engine where the phase wants it, and acknowledge once it is there."""
        phase = self._phase
        if phase is None or phase.seq == self._obeyed:
            return
        done = self._wake(phase) if phase.rollout == "awake" else self._sleep(phase)
        if done:
            self._obeyed = phase.seq

    # ---- inside
    def _wake(self, phase: Phase) -> bool:
        began = time.monotonic()
        device = f"{self._job}/{'shared' if phase.mode == 'colocated' else 'rollout'}"
        if device != self.device:
            if not self._devices.acquire(device, self._name, self._share, self._budget):
                self.waits_for_device = True
                return False
            self._release()
            self.device, self.waits_for_device = device, False
        if not self._awake:
            self._awake = True
            try:
                version = self._engine.wake(self._store)
            except (ValueError, MissingManifest, OSError) as error:
                _LOG.warning("the version served before sleep cannot be loaded again: %s", error)
                version = None
            _LOG.info("awake with %s", version or "no version")
        serving = self._engine.serving
        woke = Woke(
            who=self._name,
            seq=phase.seq,
            version=serving[0] if serving else None,
            resident=resident(),
            seconds=time.monotonic() - began,
        )
        self._emit(woke)
        return True

    def _sleep(self, phase: Phase) -> bool:
        if self._engine.running:
            return False  # what runs goes on to its end
        if self._awake:
            self._orders.forget()
            self._engine.sleep()
            self._awake = False
            self._release()
        slept = Slept(who=self._name, seq=phase.seq, resident=resident(), baseline=self.baseline)
        self._emit(slept)
        return True

    def _release(self) -> None:
        if self.device:
            self._devices.release(self.device, self._name)
            self.device = ""

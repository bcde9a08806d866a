"""What the scheduler wants, level-triggered: the newest phase, and a wait that a newer one ends."""

from __future__ import annotations

from syncline.contract.events import Phase
from syncline.contract.streams import PHASE, PHASES
from syncline.runtime.bus import Bus, unpack


class Phases:
    """The phases of one job as the trainer sees them."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus = bus
        self._key, self._stream = PHASE.at(job), PHASES.at(job)
        self._cursor = bus.last_id(self._stream)

    def newest(self) -> Phase | None:
        """The phase now wanted; None before the first."""
        raw = self._bus.get(self._key)
        return None if raw is None else unpack(raw, Phase)

    def wait(self, seconds: float) -> None:
        """Return when a phase was ordered that this has not seen, at the latest after `seconds`."""
        for entries in self._bus.read({self._stream: self._cursor}, block=seconds).values():
            self._cursor = entries[-1].id

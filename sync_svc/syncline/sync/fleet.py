"""Which rollout workers live, from their heartbeats and from what they say of themselves."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.contract.events import Heartbeat, WorkerStatus
from syncline.contract.streams import HEARTBEAT, WORKERS
from syncline.runtime.bus import Bus, unpack
from syncline.sync.state import Event, Lost, Seen

LOOK = 0.5  # seconds between looks
SILENCE = 3.0  # seconds without a heartbeat key (it outlives the last beat by 5) until a worker is lost


class Fleet:
    """Looks at the workers of one job."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus, self._job = bus, job
        self._looked = float("-inf")
        self._seen: dict[str, float] = {}  # worker -> when its heartbeat was last there, or first missed

    def look(self, known: Mapping[str, str], at: float) -> list[Event]:
        """What has changed for the workers in `workers` and the `known` ones (worker -> incarnation).

        Looks at most once per `LOOK` seconds.

        A worker that lives and serves something is `Seen` each time; the machine knows if it is news. One
        that serves nothing asks by itself (`joined`).
        """
        if at < self._looked + LOOK:
            return []
        self._looked = at
        told = self._bus.hgetall(WORKERS.at(self._job))
        statuses = {name.decode(): unpack(value, WorkerStatus) for name, value in told.items()}
        events: list[Event] = []
        for name in sorted({*statuses, *known}):
            beat = self._bus.get(HEARTBEAT.at(f"{self._job}/rollout/{name}"))
            if beat is None:
                if at >= self._seen.setdefault(name, at) + SILENCE:
                    events.append(Lost(worker=name))
                    self._bus.hdel(WORKERS.at(self._job), name)
                    del self._seen[name]
                continue
            self._seen[name] = at
            incarnation = unpack(beat, Heartbeat).incarnation
            status = statuses.get(name)
            if status is not None and status.incarnation == incarnation and status.version is not None:
                seen = Seen(
                    worker=name, incarnation=incarnation, version=status.version, digest=status.digest
                )
                events.append(seen)
            elif known.get(name, incarnation) != incarnation:
                events.append(Lost(worker=name))  # replaced by a process that has said nothing yet
        return events

"""An evaluation's work among the job's own: taken within its share, begun under its version alone.

What is begun is sampled, scored and published like any trajectory, into the evaluation's own streams and ledger, so
none of it can reach the trainer. What is not begun when another version serves here is left to the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from syncline.contract.evaluation import Guest
from syncline.contract.streams import GUEST
from syncline.contract.token_path import parse_trajectory_id
from syncline.contract.version_path import VersionId
from syncline.rollout.intake import Held, Intake
from syncline.rollout.publishing import Publisher
from syncline.rollout.session import Closed
from syncline.runtime.bus import Bus, unpack

LOOK = 0.25  # seconds between looks for an evaluation


class Visit(msgspec.Struct, frozen=True):
    """One evaluation here."""

    guest: Guest
    intake: Intake
    publisher: Publisher


class Guests:
    """The evaluations that this worker has work of.

    open   makes the intake and the publisher of an evaluation, given its job and its number of groups
    """

    def __init__(self, bus: Bus, job: str, open: Callable[[str, int], tuple[Intake, Publisher]]) -> None:
        self._bus, self._key, self._open = bus, GUEST.at(job), open
        self._visits: dict[str, Visit] = {}  # by the evaluation's job
        self._now: Visit | None = None
        self._looked = float("-inf")

    @property
    def waiting(self) -> bool:
        """Whether items wait to be begun."""
        return self._now is not None and bool(self._now.intake.waiting)

    def look(self) -> list[str]:
        """See which evaluation there is. Returns trajectories that were taken over from this worker."""
        lost = [name for visit in self._visits.values() for name in visit.intake.keep_alive()]
        if time.monotonic() < self._looked + LOOK:
            return lost
        self._looked = time.monotonic()
        raw = self._bus.get(self._key)
        guest = None if raw is None else unpack(raw, Guest)
        if guest is not None and guest.job not in self._visits:
            visit = Visit(guest, *self._open(guest.job, guest.groups))
            visit.intake.recover()
            self._visits[guest.job] = visit
        self._now = None if guest is None else self._visits[guest.job]
        for job in [job for job, visit in self._visits.items() if visit is not self._now]:
            self._leave(job)
        return lost

    @property
    def held(self) -> bool:
        """Whether anything is held."""
        return any(visit.intake.held for visit in self._visits.values())

    def hand_back(self, begun: bool = True) -> None:
        """This worker ends. begun: what has begun is handed back, too."""
        for visit in self._visits.values():
            visit.intake.hand_back(begun)

    def take(
        self, serving: tuple[VersionId, str], room: int, alone: bool, submit: Callable[[Held], None]
    ) -> None:
        """Begin what may begin. `alone`: the job's own work needs none of the `room` now."""
        visit = self._now
        if visit is None or serving != (visit.guest.version, visit.guest.digest):
            return
        begun = len(visit.intake.held) - len(visit.intake.waiting)
        room = room if alone else min(room, visit.guest.slots - begun)
        if room > 0:
            visit.intake.take(room)
            visit.intake.begin(visit.guest.version, room, submit)

    def of(self, trajectory: str) -> Visit | None:
        """The evaluation that a trajectory is of; None: it is the job's own."""
        return self._visits.get(parse_trajectory_id(trajectory)[0])

    def publish(self, closed: Sequence[Closed]) -> list[Closed]:
        """Publish the evaluations' among `closed`, and return the rest."""
        rest = []
        for session in closed:
            visit = self.of(session.trajectory)
            if visit is None:
                rest.append(session)
            else:
                visit.publisher.publish([session])
        return rest

    def _leave(self, job: str) -> None:
        """Forget an evaluation that is over, once nothing of it runs here. What was not begun is its ledger's."""
        held = self._visits[job].intake
        for waiting in held.waiting:
            held.drop(waiting.item.trajectory)
        if not held.held:
            del self._visits[job]

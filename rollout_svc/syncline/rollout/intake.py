"""Work items: taken from the stream, begun when the ledger lets them, kept alive, taken over from the silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from syncline.contract.events import WorkItem
from syncline.contract.streams import DEAD, GROUP_ROLLOUT, WORK
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import BadMessage, Bus, Entry, unpack
from syncline.runtime.ledger import Ledger

_LOG = logging.getLogger("syncline.rollout")
_AT_ONCE = 16  # items taken between two decode steps: other workers should have some
_ASK_AGAIN = 0.1  # seconds between two questions to the ledger about items that wait
_SOON = 0.5  # seconds between two looks for what was handed back
_PATIENCE = 1.0  # seconds that waiting items keep this worker from taking others


class Held(msgspec.Struct, kw_only=True):
    """A work item of this worker's. `begun`: the engine has it; else it waits for the ledger's `go`.

    version   that the ledger let it begin under
    why       what ended the attempt before this one, and with it what its worker held of it; "": there was none
    """

    work_id: str
    item: WorkItem
    attempt: int
    taken: float  # monotonic
    begun: float | None = None  # monotonic
    version: VersionId | None = None
    why: str = ""


class Intake:
    """What this worker holds of `work`.

    name    consumer name in the group
    idle    seconds after which a silent consumer's items are taken over
    pinned  all of it is to be sampled under the one version that it began under
    alone   there is no other worker that should have some
    """

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        job: str,
        name: str,
        idle: float,
        pinned: bool = False,
        alone: bool = False,
    ) -> None:
        self._bus, self._ledger, self._job, self._name, self._idle = bus, ledger, job, name, idle
        self._pinned = pinned
        self._alone = alone
        self._key = WORK.at(job)
        self.held: dict[str, Held] = {}  # by trajectory
        self._asked = float("-inf")
        self._under: VersionId | None = None  # what the ledger was asked for last
        self._kept = time.monotonic()
        self._looked = float("-inf")

    @property
    def waiting(self) -> list[Held]:
        """Items not begun, oldest first."""
        return [held for held in self.held.values() if held.begun is None]

    def recover(self) -> None:
        """Take up what an earlier process of this name left behind."""
        self._bus.ensure_group(self._key, GROUP_ROLLOUT)
        self._take_again(
            self._bus.group_pending(self._key, GROUP_ROLLOUT, self._name), "its worker restarted"
        )

    def take(self, room: int, soon: bool = False) -> None:
        """Take new items, and silent workers' items, as far as `room` requests can still begin.

        soon   look for those at once: some were handed back
        """
        now = time.monotonic()
        waiting = self.waiting
        room -= len(waiting)
        if room <= 0 or (waiting and now < waiting[0].taken + _PATIENCE):
            return
        if now >= self._looked + (min(_SOON, self._idle / 2) if soon else self._idle / 2):
            self._looked = now
            found = self._bus.group_take_over(self._key, GROUP_ROLLOUT, self._name, self._idle, room)
            self._take_again(found, f"its worker was silent for {self._idle:g} s")
            room -= len(found)
        if room > 0:
            count = room if self._alone else min(room, _AT_ONCE)
            self._take_new(self._bus.group_read(self._key, GROUP_ROLLOUT, self._name, count, None))

    def begin(self, version: VersionId, room: int, submit: Callable[[Held], None]) -> None:
        """Ask the ledger for each waiting item and `submit` those that may begin under `version`: at once if that is a
        new one, and now and then, for what is claimed meanwhile makes room under an old one as well.

        A `ValueError` of `submit` ends the trajectory as failed: it would fail everywhere.
        """
        waiting = self.waiting
        if not waiting or (version == self._under and time.monotonic() < self._asked + _ASK_AGAIN):
            return
        self._under = version
        waiting = waiting[:room]
        asked = [(held.item.trajectory, held.attempt) for held in waiting]
        answers = self._ledger.begin_many(asked, self._name, version)
        for held, answer in zip(waiting, answers, strict=True):
            if answer == "fenced":
                self.drop(held.item.trajectory)
            elif answer == "go":
                held.begun, held.version = time.monotonic(), version
                self._submit(held, submit)
        if self.waiting:
            self._asked = time.monotonic()

    def sampled(self, trajectory: str, oldest: VersionId) -> bool:
        """Whether the item may be published, whose first token came under `oldest`.

        That can be later than what it began under: an engine whose server died, or that was told to end a request
        which had no token yet, begins it anew under the next version. The ledger is told, as it was at first. If it
        does not agree, or the item is pinned, the next attempt begins. An older version is the ledger's to refuse.
        """
        held = self.held[trajectory]
        if held.version is None or oldest <= held.version:
            return True
        if not self._pinned:
            answer = self._ledger.begin(trajectory, held.attempt, self._name, oldest)
            if answer != "wait":  # `fenced` is said again when it is published
                held.version = oldest
                return True
        why = f"its first token came under {oldest}, and it began under {held.version}"
        self.drop(trajectory)
        self._retry(held.work_id, held.item, why)
        return False

    def ask_now(self) -> None:
        """What waits may begin in the next turn."""
        self._asked = float("-inf")

    def drop(self, trajectory: str) -> None:
        """Forget an item: published, ended, or somebody else's."""
        del self.held[trajectory]

    def fail(self, trajectory: str, why: str) -> None:
        """End an item that no other try would save."""
        _LOG.error("trajectory %s cannot be sampled: %s", trajectory, why)
        self._ledger.end(trajectory, "failed", why)
        self.drop(trajectory)

    def keep_alive(self) -> list[str]:
        """Tell the group that this worker lives. Returns trajectories that were taken over from it."""
        now = time.monotonic()
        if now < self._kept + self._idle / 4:
            return []
        self._kept = now
        ids = [held.work_id for held in self.held.values()]
        mine = set(self._bus.group_keep(self._key, GROUP_ROLLOUT, self._name, ids))
        lost = [name for name, held in self.held.items() if held.work_id not in mine]
        for name in lost:
            _LOG.warning("trajectory %s was taken over from this worker", name)
            del self.held[name]
        return lost

    def hand_back(self, begun: bool = True) -> None:
        """This worker ends: let others take what it holds at once, and not only when it has long been silent.

        begun   what has begun, too; else it goes on here to its end
        """
        back = list(self.held.values()) if begun else self.waiting
        ids = [held.work_id for held in back]
        self._bus.group_keep(self._key, GROUP_ROLLOUT, self._name, ids, idle=self._idle)
        for held in back:
            self.drop(held.item.trajectory)

    # ---- inside
    def _submit(self, held: Held, submit: Callable[[Held], None]) -> None:
        try:
            submit(held)
        except ValueError as error:
            self.fail(held.item.trajectory, str(error))

    def _take_new(self, entries: Sequence[Entry]) -> None:
        items = self._readable(entries)
        lines = self._ledger.entries(item.trajectory for _, item in items)
        for work_id, item in items:
            line = lines.get(item.trajectory)
            if line is None or line.work_id != work_id:  # ended, or put back under another entry
                self._bus.ack(self._key, GROUP_ROLLOUT, [work_id])
            elif line.worker is not None:  # begun before: the group was made anew and delivers again
                self._retry(work_id, item, "its work item was delivered again")
            else:
                self._hold(work_id, item, line.attempt)

    def _take_again(self, entries: Sequence[Entry], why: str) -> None:
        for work_id, item in self._readable(entries):
            if item.trajectory not in self.held:
                self._retry(work_id, item, why)

    def _retry(self, work_id: str, item: WorkItem, why: str) -> None:
        attempt = self._ledger.retry(item.trajectory, work_id, why)
        if attempt is None:
            _LOG.info("trajectory %s is not tried again: %s", item.trajectory, why)
        else:
            self._hold(work_id, item, attempt, why)

    def _hold(self, work_id: str, item: WorkItem, attempt: int, why: str = "") -> None:
        self.held[item.trajectory] = Held(
            work_id=work_id, item=item, attempt=attempt, taken=time.monotonic(), why=why
        )

    def _readable(self, entries: Sequence[Entry]) -> list[tuple[str, WorkItem]]:
        """(id, item) of `entries`; one that cannot be read goes to the dead letters with the reason."""
        found = []
        for entry in entries:
            try:
                found.append((entry.id, unpack(entry, WorkItem)))
            except BadMessage as error:
                _LOG.error("dead letter: %s", error)
                letter = {
                    b"key": self._key.encode(),
                    b"id": entry.id.encode(),
                    b"reason": str(error).encode(),
                }
                self._bus.append(DEAD.at(self._job), letter, cap=10_000)
                self._bus.ack(self._key, GROUP_ROLLOUT, [entry.id])
        return found

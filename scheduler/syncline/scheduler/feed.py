"""Work for the rollout workers: new groups while there is room, and what was lost on the way, again."""

from __future__ import annotations

import time

import msgspec

from syncline.contract.events import WorkItem
from syncline.contract.job import JobSpec
from syncline.contract.streams import RATES
from syncline.contract.token_path import PROMPTED, parse_trajectory_id, trajectory_id
from syncline.runtime.bus import Bus
from syncline.runtime.errands import Errands, ScoreErrand
from syncline.runtime.ledger import Demand, Ledger
from syncline.runtime.tracing import hop
from syncline.scheduler import outcomes
from syncline.scheduler.prompts import Drawn, Rates, Sequences, account
from syncline.scheduler.saved import Watch
from syncline.scheduler.sources import sources

AGAIN = 5.0  # seconds between looks for lost work and lost errands
PAGE = 1000  # outcomes folded at a time
_ORDER = "order:"  # before the data set, in RATES: an epoch's order that rewards decided


class Feeder:
    """Draws prompts and submits their groups, and sends again what time shows to be lost.

    What is drawn is saved (`saved.py`) before it is submitted, with the cursor of the outcomes that it followed from.
    `unsaved`: what the next save must write into RATES.
    """

    def __init__(self, job: str, spec: JobSpec, ledger: Ledger, errands: Errands, bus: Bus) -> None:
        """Raises `ValueError` naming the key for data sets that the spec's ranges do not fit."""
        self._job, self._ledger, self._errands = job, ledger, errands
        self._size, self._batch = spec.batch.group_size, spec.batch.groups
        self._demand = _demand(spec)
        self._sequences = Sequences(sources(spec), spec.prompts, spec.seeds.data)
        self._rates: Rates = {}
        self.unsaved: dict[str, bytes] = {}
        self._dropped = "0"
        if spec.prompts.measures:
            self._load_rates(bus)
        self._patience = 2 * spec.reward.timeout + 5.0
        self._looked = time.monotonic()
        self._sent: dict[str, float] = {}  # trajectory -> when its errand was sent again

    # ---- prompts -----------------------------------------------------------------------------------------------
    def note(self, watch: Watch, left: bool = False) -> None:
        """Fold how groups ended since the last look. `left`: they ended because the job did."""
        drawn = self._drawn(watch)
        while page := self._ledger.outcomes(drawn.cursor, PAGE):
            for cursor, outcome in page:
                key = outcomes.fold(drawn, outcome, self._sequences, self._rates, left)
                if key is not None:
                    self.unsaved[key] = msgspec.json.encode(self._rates[key])
                drawn.cursor = cursor

    def draw(self, watch: Watch, groups: int) -> None:
        """Decide on so many new groups. To be saved before `submit`."""
        drawn, orders = self._drawn(watch), dict(self._sequences.orders)
        for _ in range(groups):
            drawn.pending.append(self._sequences.next(drawn, watch.group, self._rates))
            watch.group += 1
        for which, order in self._sequences.orders.items():
            if orders.get(which) != order:
                self.unsaved[f"{_ORDER}{which}"] = msgspec.json.encode(order)

    def submit(self, watch: Watch) -> int:
        """Submit what was decided and saved, also by a predecessor; a group that the ledger knows is there already."""
        drawn = self._drawn(watch)
        pending, drawn.pending = drawn.pending, []
        for draw in pending:
            items = [self.item(draw.group, i, draw.prompt) for i in range(self._size)]
            self._ledger.submit(items, self._size, self._demand)
        return len(pending)

    def saved(self, watch: Watch) -> None:
        """What was noted and drawn is on record: the outcomes behind the cursor are not needed again."""
        self.unsaved = {}
        cursor = self._drawn(watch).cursor
        if cursor != self._dropped:
            self._dropped = cursor
            self._ledger.drop_outcomes(cursor)

    def in_vain(self, watch: Watch) -> str | None:
        """Why nothing more will come of the job's prompts; None: something may."""
        return outcomes.in_vain(self._drawn(watch), self._sequences, self._batch)

    def told(self, watch: Watch) -> str:
        """`PromptAccount` of what was drawn, as JSON for the job's hash."""
        return msgspec.json.encode(account(self._drawn(watch))).decode()

    def _drawn(self, watch: Watch) -> Drawn:
        if watch.prompts is None:  # a new job, or one that was saved when group g sampled prompt g
            watch.prompts = self._sequences.begin(watch.group)
        return watch.prompts

    def _load_rates(self, bus: Bus) -> None:
        for name, value in bus.hgetall(RATES.at(self._job)).items():
            key = name.decode()
            if key.startswith(_ORDER):
                which = int(key.removeprefix(_ORDER))
                self._sequences.orders[which] = msgspec.json.decode(value, type=tuple[int, list[int]])
            else:
                self._rates[key] = msgspec.json.decode(value, type=tuple[int, float])

    # ---- repairs -----------------------------------------------------------------------------------------------
    def again(self) -> int:
        """Now and then: put lost work items back and send lost score errands again; how many there were."""
        now = time.monotonic()
        if now - self._looked < AGAIN:
            return 0
        self._looked = now
        lost = self._ledger.lost_work()
        for entry in lost:
            _, group, index = parse_trajectory_id(entry.trajectory)
            self._ledger.resubmit(self.item(group, index, entry.prompt))
        late = [
            entry
            for entry in self._ledger.unrewarded(self._patience)
            if now - self._sent.get(entry.trajectory, float("-inf")) >= self._patience
        ]
        if late:
            self._errands.send_scores(self._job, [ScoreErrand(e.trajectory, e.attempt) for e in late])
        self._sent = {t: at for t, at in self._sent.items() if now - at < 10 * self._patience}
        self._sent |= dict.fromkeys((entry.trajectory for entry in late), now)
        return len(lost) + len(late)

    def item(self, group: int, index: int, prompt: int) -> WorkItem:
        """One work item. Its `prompted` hop is the root of the trajectory's trace."""
        trajectory = trajectory_id(self._job, group, index)
        with hop(PROMPTED, job=self._job, trajectory=trajectory, group=group, index=index) as opened:
            return WorkItem(
                job=self._job,
                trajectory=trajectory,
                group=group,
                index=index,
                prompt=prompt,
                traceparent=opened.traceparent,
                submitted_at=time.time(),
            )


def _demand(spec: JobSpec) -> Demand:
    """What a group must offer to be claimed."""
    if spec.prompts.zero_variance == "train":
        return ""
    return "whole" if spec.batch.incomplete == "drop" else "signal"

"""Work for the rollout workers: new groups while there is room, and what was lost on the way, again."""

from __future__ import annotations

import time

from syncline.contract.events import WorkItem
from syncline.contract.job import JobSpec
from syncline.contract.token_path import PROMPTED, parse_trajectory_id, trajectory_id
from syncline.runtime.errands import Errands, ScoreErrand
from syncline.runtime.ledger import Ledger
from syncline.runtime.tracing import hop
from syncline.scheduler.saved import Watch

AGAIN = 5.0  # seconds between looks for lost work and lost errands


class Feeder:
    """Submits the groups of one job, each prompt index once, and sends again what time shows to be lost."""

    def __init__(self, job: str, spec: JobSpec, ledger: Ledger, errands: Errands) -> None:
        self._job, self._ledger, self._errands = job, ledger, errands
        self._size = spec.batch.group_size
        self._patience = 2 * spec.reward.timeout + 5.0
        self._looked = time.monotonic()
        self._sent: dict[str, float] = {}  # trajectory -> when its errand was sent again

    def submit(self, watch: Watch, groups: int) -> None:
        """Submit so many new groups. Group g samples prompt g; a group that is known already is passed over."""
        left = groups
        while left > 0:
            group = watch.group
            known = self._ledger.entry(trajectory_id(self._job, group, 0)) is not None
            if not known and self._ledger.submit(
                [self._item(group, i) for i in range(self._size)], self._size
            ):
                left -= 1
            watch.group = group + 1

    def again(self) -> int:
        """Now and then: put lost work items back and send lost score errands again; how many there were."""
        now = time.monotonic()
        if now - self._looked < AGAIN:
            return 0
        self._looked = now
        lost = self._ledger.lost_work()
        for entry in lost:
            _, group, index = parse_trajectory_id(entry.trajectory)
            self._ledger.resubmit(self._item(group, index))
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

    def _item(self, group: int, index: int) -> WorkItem:
        """One work item. Its `prompted` hop is the root of the trajectory's trace."""
        trajectory = trajectory_id(self._job, group, index)
        with hop(PROMPTED, job=self._job, trajectory=trajectory, group=group, index=index) as opened:
            return WorkItem(
                job=self._job,
                trajectory=trajectory,
                group=group,
                index=index,
                prompt=group,
                traceparent=opened.traceparent,
                submitted_at=time.time(),
            )

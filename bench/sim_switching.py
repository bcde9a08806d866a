"""A simulated job that may change its mode, and whose phases may drift: `sim_world.World` with the real policy.

The policy decides from the same facts as in a service: `scheduler.policy.cycles` of update metrics and phases, then
`decide`. What a mode costs is the case's; what changes from update to update is `shape`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from msgspec.structs import asdict, replace
from sim_cases import Case, Mode
from sim_world import World

from syncline.contract import events as e
from syncline.scheduler import machine
from syncline.scheduler.policy import cycles, decide

BLANK = e.UpdateMetrics(
    update=0,
    epoch=0,
    mode="colocated",
    groups=0,
    trajectories=0,
    tokens=0,
    reward=None,
    unscored=0,
    lag_max=0,
    lag_mean=0.0,
    lag_counts={},
    loss=None,
    grad_norm=None,
    entropy=None,
    ratio_mean=None,
    clip_fraction=None,
    gap_mean=None,
    gap_max=None,
    same_version_gap=None,
    kl=None,
    response_mean=0.0,
    masked_tokens=0,
    expired=0,
    waited=0.0,
    seconds=0.0,
    non_finite=0,
    skipped=False,
    at=0.0,
)


class Switching(World):
    """A run that begins in `mode`, and changes it as the policy says if `policy`; both fleets have the same workers.

    train   seconds of training of the update, in a mode
    slow    how many times slower a worker decodes, in a mode
    """

    def __init__(
        self,
        case: Case,
        mode: Mode,
        updates: int,
        train: Callable[[int, Mode], float],
        slow: Callable[[Mode], float],
        policy: bool,
    ) -> None:
        self.phase_log: list[e.Phase] = []
        self.metrics: list[e.UpdateMetrics] = []
        self.changes: list[tuple[int, Mode]] = []
        self._train_seconds, self._slow, self._policy = train, slow, policy
        super().__init__(case, mode, updates)
        self._take(mode)

    def _take(self, mode: Mode) -> None:
        self.mode = mode
        self.fleet = replace(self.case.fleets[mode], train=self._train_seconds(self.minted + 1, mode))
        for worker in self.workers.values():
            worker.slow = self._slow(mode)

    def _perform(self, commands: tuple[machine.Command, ...]) -> None:
        for command in commands:
            if isinstance(command, machine.Order):
                self.phase_log.append(e.Phase(**asdict(command), at=self.now))
                if command.mode != self.mode:
                    self.changes.append((self.minted, command.mode))
                    self._take(command.mode)
        super()._perform(commands)

    def _mint(self) -> None:
        made = self.minted + 1
        told = replace(
            BLANK,
            update=made,
            mode=self.mode,
            groups=self.case.groups,
            seconds=self._train_seconds(made, self.mode),
            at=self.now,
        )
        if made > 0:
            self.metrics.append(told)
        super()._mint()
        self._take(self.mode)
        if self._policy and made > 0 and self.state.wanted == self.state.mode:
            self._wish(made)

    @property
    def submitted_updates(self) -> float:
        """Updates' worth of groups that were submitted."""
        return (self.submitted + 1) / self.case.groups

    def _wish(self, made: int) -> None:
        changed = [after.update for before, after in pairwise(self.phase_log) if before.mode != after.mode]
        since = made - (changed[-1] if changed else 0)
        history = cycles(self.metrics, self.phase_log)
        mode = decide(history, self.state.mode, self.updates - made, True, since)
        if mode is not None:
            self.tell(e.SwitchTo(mode=mode, why="policy"))

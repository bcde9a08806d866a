"""What is real about a job: its processes, its ledger, the clock. Told to the machine as events.

Level-triggered: what the machine does not know of yet is told again each time, until it does.
"""

from __future__ import annotations

import time
from logging import Logger
from pathlib import Path

import msgspec

from syncline.contract import events as e
from syncline.contract.job import JobSpec
from syncline.runtime import steady
from syncline.runtime.bus import Bus
from syncline.runtime.errands import Errands
from syncline.runtime.ledger import Ledger
from syncline.runtime.settings import Settings
from syncline.scheduler import observe, pool, scaling
from syncline.scheduler.barren import Barren
from syncline.scheduler.launch.launcher import Launcher, Observed
from syncline.scheduler.placement import Commands, place
from syncline.scheduler.policy import Policy
from syncline.scheduler.saved import Saved, Watch
from syncline.scheduler.stages import State, kept, number
from syncline.scheduler.waits import waits

PATIENCE = 2.0  # seconds for which a batch must look short: the trainer may be about to claim
APPLY = 0.3  # seconds between looks at the processes
COUNT = 0.5  # seconds between looks at the ledger's sums


class Tools(msgspec.Struct, frozen=True):
    """What the scheduler hands to each job that it runs. `holder`: this scheduler's incarnation."""

    bus: Bus
    holder: str
    settings: Settings
    launcher: Launcher
    errands: Errands
    commands: Commands
    log: Logger


class Lookout:
    """Looks at what is real. `view`: the ledger as seen last; None: a claim changed while it was read."""

    def __init__(self, tools: Tools, job: str, spec: JobSpec, ledger: Ledger) -> None:
        self._tools, self._job, self._spec, self._ledger = tools, job, spec, ledger
        self.policy = Policy(tools.bus, job, spec)
        self._scaler = scaling.Scaler(tools.bus, job, spec, tools.launcher.fixed)
        self.view: observe.Seen | None = None
        self._short: float | None = None
        self._barren = Barren(spec)
        self._applied = self._counted = float("-inf")

    def look(self, saved: Saved, since: float) -> list[e.Event]:
        """Where the world differs from `saved`. `since`: wall-clock second at which the stage was entered."""
        state, watch = saved.state, saved.watch
        found = self._processes(state, watch)
        self.view = self._see(state)
        if state.stage == "done":
            return found
        if self.view is not None and self._spec.kind == "train":
            found += self._patient(observe.ledger_events(state, self.view))
        return found + self._wishes(state, watch) + self._overdue(state, watch, since) + self._in_vain(watch)

    def _processes(self, state: State, watch: Watch) -> list[e.Event]:
        """Bring the processes a step nearer to what is wanted; what has happened to them."""
        if time.monotonic() - self._applied < APPLY:
            return []
        self._applied = time.monotonic()
        settings, launcher = self._tools.settings, self._tools.launcher
        folder: Path = settings.job_dir(self._job)
        wanted = place(self._job, self._spec, state, settings.environ(), folder, self._tools.commands)
        try:
            launcher.apply(wanted)
        except ValueError as error:
            return [e.Failed(who="scheduler", reason=str(error))]
        observed = launcher.observe()
        left = pool.left(self._job, state, observed)
        pool.give_on(self._ledger, [event.who for event in left])
        return [*self._deaths(state, observed, watch), *left]

    def _deaths(self, state: State, observed: Observed, watch: Watch) -> list[e.Event]:
        found = [one for one in lost(self._job, observed, watch) if number(one.who) < kept(state)]
        for event in found:
            self._tools.log.warning("%s/%s died (exit %s)", self._job, event.who, event.exit)
        return [*found]

    def _see(self, state: State) -> observe.Seen | None:
        """The ledger's state, or None if a claim was made or undone while it was read."""
        schedule = self._spec.schedule
        if (found := self._ledger.between_claims()) is None:
            return None
        claimed, groups = found
        draining = state.stage == "drain"
        members = (
            [m for g, it in groups.items() for m in self._ledger.members(g, it.size)] if draining else []
        )
        return observe.seen(
            groups,
            members,
            claimed,
            -1 if state.minted is None else state.minted.number,
            self._spec.batch.groups,
            schedule.max_lag,
            schedule.lag_policy,
        )

    def _patient(self, found: list[e.Event]) -> list[e.Event]:
        """`found`, but a short batch only when it has looked short for a while."""
        short = any(isinstance(event, e.BatchShort) for event in found)
        self._short = (self._short or time.monotonic()) if short else None
        if self._short is not None and time.monotonic() - self._short < PATIENCE:
            return [event for event in found if not isinstance(event, e.BatchShort)]
        return found

    def _wishes(self, state: State, watch: Watch) -> list[e.Event]:
        """A switch that the spec's plan or the measured policy asks for now."""
        if state.minted is None:
            return []
        due = [plan for plan in self._spec.schedule.switches if plan.at_update <= state.minted.number]
        if len(due) > watch.plan:
            return [e.SwitchTo(mode=plan.mode, why="plan") for plan in due[watch.plan :]]
        return self._by_policy(state, watch)

    def _by_policy(self, state: State, watch: Watch) -> list[e.Event]:
        """What was measured asks for: another mode, or another number of workers. Only one of both acts at a time."""
        assert state.minted is not None
        mode = self.policy.wish(state) if scaling.rested(watch, state.minted.number) else None
        if mode is not None:
            return [e.SwitchTo(mode=mode, why="policy")]
        workers = self._scaler.wish(state, watch)
        return [] if workers is None else [e.ScaleTo(workers=workers, why="policy")]

    def _overdue(self, state: State, watch: Watch, since: float) -> list[e.Event]:
        """A `Failed` for the first wait that is over its deadline, unless the job can do without its worker."""
        now = steady.now()
        if found := pool.overdue(self._spec, state, watch, now):
            return found
        for wait in waits(self._spec, state, since, watch.awaited):
            spared = wait.name == "worker" and pool.may_be_given_up(self._spec, state, wait.owner)
            if now > wait.deadline and not spared:
                reason = f"waited {now - wait.since:.0f} s for {wait.name} of {wait.owner}: {wait.detail}"
                return [e.Failed(who="scheduler", reason=reason)]
        return []

    def _in_vain(self, watch: Watch) -> list[e.Event]:
        """A `Failed` when whole batches have failed and nothing came of any: what is submitted next would too."""
        if time.monotonic() - self._counted < COUNT:
            return []
        self._counted = time.monotonic()
        failed = self._barren.failed_in_a_row(self._ledger.counts())
        if not failed:
            return []
        size, newest = self._spec.batch.group_size, range(watch.group - 1, max(-1, watch.group - 9), -1)
        members = [m for group in newest for m in self._ledger.members(group, size) if m.state == "failed"]
        why = members[0].reason if members else "no reason is recorded"
        return [
            e.Failed(who="rollout", reason=f"{failed} trajectories failed in a row, none was sampled: {why}")
        ]


def lost(job: str, observed: Observed, watch: Watch) -> list[e.WorkerLost]:
    """One for each process that died since it was last told, which `watch` then remembers.

    A death may be seen late, when another process has taken the name and reported for duty already: nobody waits for
    that one, so nothing is told.
    """
    found = []
    for name, view in observed.processes.items():
        who = name.removeprefix(f"{job}/")
        deaths = view.starts - (view.state in ("running", "stopping"))
        back = view.state == "running" and 0.0 < view.since < watch.up.get(who, 0.0)
        if deaths > watch.deaths.get(who, 0) and not back:
            found.append(e.WorkerLost(who=who, exit=view.exit))
        watch.deaths[who] = deaths
    return found

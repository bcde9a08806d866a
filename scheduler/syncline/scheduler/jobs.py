"""One job on its way through the scheduler: fold its events, look at what is real, feed it, end it.

Each method is one step of a turn of the loop and may be repeated; everything that must survive a kill is in
`Saved` and written by `saved.save`, together with the orders that follow from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.contract import events as e
from syncline.contract.job import JobSpec
from syncline.contract.judging import JudgeStatus
from syncline.contract.streams import DEAD, EVENTS, JOB, JUDGED, KEYS, SAMPLES
from syncline.runtime import steady
from syncline.runtime.bus import BadMessage, Entry, unpack
from syncline.runtime.ledger import Ledger
from syncline.scheduler import invariants, machine, observe, pool
from syncline.scheduler.feed import Feeder
from syncline.scheduler.guests import Guests
from syncline.scheduler.launch.launcher import Placement
from syncline.scheduler.lookout import Lookout, Tools
from syncline.scheduler.placement import workers
from syncline.scheduler.returning import mark_ended
from syncline.scheduler.saved import Saved, Watch, save
from syncline.scheduler.stages import STANCES, TRAINER, State
from syncline.scheduler.waits import judge_waits, waits

PAGE = 200  # events folded before a save
LEAK = 1.1  # times its baseline that a sleeping engine may hold
BEAT = 1.0  # seconds between samples of the ledger
NOTE = 0.5  # seconds between looks at how groups ended, while no prompt is drawn


class Job:
    """The job that runs. `saved` is what a killed scheduler's successor finds."""

    def __init__(self, tools: Tools, job: str, spec: JobSpec, saved: Saved) -> None:
        self.job, self.spec, self.saved = job, spec, saved
        self._tools, self._bus = tools, tools.bus
        self._ledger = Ledger.under(tools.bus, job, spec)
        self._feeder = Feeder(job, spec, self._ledger, tools.errands, tools.bus)
        self._lookout = Lookout(tools, job, spec, self._ledger)
        self._guests = Guests(tools, job, spec)
        self._since, self._stage = steady.now(), saved.state.stage
        self._beat = self._noted = 0.0
        self._judge: JudgeStatus | None = None
        self._fields: dict[str, str] = {}  # of the job hash, as written last

    # ---- one turn --------------------------------------------------------------------------------------------
    def fold(self, block: float | None) -> bool:
        """Take the job's next events, and save what follows with the orders. True: there were no more.

        block   seconds to wait for the first event
        """
        key = EVENTS.at(self.job)
        entries = self._bus.read({key: self.saved.cursor}, block=block, count=PAGE).get(key, [])
        orders: list[e.Phase] = []
        for entry in entries:
            event = self._event(entry)
            if event is not None:
                commands = self._step(event)
                self._note(event, moment(entry.id))
                orders += [phase(command) for command in commands if isinstance(command, machine.Order)]
            self.saved.cursor = entry.id
        if entries:
            self._mark_stage()
            self.write(orders)
        return len(entries) < PAGE

    def look(self) -> None:
        """Tell the machine where the world differs from what it knows."""
        found = self._lookout.look(self.saved, self._since)
        if self.state.stage != "done" and (story := self._feeder.in_vain(self.saved.watch)):
            found.append(e.Failed(who="scheduler", reason=story))
        if self._guests.holds(self.state):
            found = [event for event in found if not isinstance(event, e.BatchReady)]
        for event in found:
            self._bus.append(EVENTS.at(self.job), event)

    def feed(self) -> None:
        """Submit groups while the gate is open and there is room; repair what was lost."""
        if self.state.stage == "done":
            return
        self._guests.turn(self.state)
        view, watch = self._lookout.view, self.saved.watch
        if self._feeder.submit(watch):  # a predecessor's: the view does not show it yet
            return
        groups = 0
        if view is not None and STANCES[self.state.stage].gate == "open":
            schedule, batch = self.spec.schedule, self.spec.batch.groups
            extra = self.spec.prompts.extra(batch)
            groups = observe.room(self.state, view, batch, schedule.max_lag, extra, schedule.lag_policy)
        if groups or time.monotonic() - self._noted >= NOTE:
            self._noted = time.monotonic()
            self._feeder.note(watch)
        if groups:
            self._feeder.draw(watch, groups)
            self.write()
            self._feeder.submit(watch)
        self._feeder.again()

    def tell(self) -> None:
        """Once a second: a sample of the ledger, and what the job waits for."""
        now = time.monotonic()
        if now - self._beat < BEAT:
            return
        self._beat = now
        if self.spec.reward.source == "http" and (raw := self._bus.hget(JOB.at(self.job), "judge")):
            self._judge = msgspec.json.decode(raw, type=JudgeStatus)
        sample = self._ledger.sample(time.time())
        self._bus.append(SAMPLES.at(self.job), sample, cap=100_000)
        if not sample.holds:
            self._tools.log.error("%s: the conservation law is broken: %s", self.job, sample)
            self._bus.hincrby(JOB.at(self.job), "violations")
        if self.state.stage != "done":
            self.write()

    def finish(self) -> bool:
        """Bring an ended job to rest: processes, open trajectories, state. True: it is over."""
        result = self.state.result
        if result is None:
            return False
        launcher = self._tools.launcher
        launcher.apply(Placement())
        if launcher.observe().processes:
            return False
        self._guests.finish()
        self._end_open("cancelled" if result.state == "cancelled" else "job ended")
        self._beat = 0.0
        self.tell()
        ending = {"state": result.state, "reason": result.reason, "waits": "[]", "ended": repr(time.time())}
        ending["prompts"] = self._feeder.told(self.saved.watch)
        mark_ended(self.folder, result.state, result.reason)
        self._save([], self._changed(ending))
        for key in KEYS:
            if key.scope == "job":
                self._bus.expire(key.at(self.job), self.spec.retention.hours * 3600)
        self._tools.log.info("%s ended: %s %s", self.job, result.state, result.reason)
        return True

    def _end_open(self, reason: str) -> None:
        self._feeder.note(self.saved.watch)
        for entry in self._ledger.open_lines():
            if entry.state in ("running", "buffered"):
                self._ledger.end(entry.trajectory, "expired", reason)
        self._feeder.note(self.saved.watch, left=True)

    @property
    def state(self) -> State:
        """The machine's state."""
        return self.saved.state

    @property
    def folder(self) -> Path:
        """The job's folder."""
        return self._tools.settings.job_dir(self.job)

    # ---- memory ----------------------------------------------------------------------------------------------
    def write(self, orders: Sequence[e.Phase] = ()) -> None:
        """Save memory, orders, and those fields of the job hash that have changed."""
        found = waits(self.spec, self.state, self._since, self.saved.watch.awaited)
        found += self._guests.waits(self.state)
        found += judge_waits(self.spec, self._judge, time.time())
        fields = {
            "state": job_state(self.state),
            "mode": self.state.mode,
            "update": str(0 if self.state.minted is None else self.state.minted.number),
            "waits": msgspec.json.encode(found).decode(),
            "prompts": self._feeder.told(self.saved.watch),
        }
        if self.spec.kind == "train":
            told = pool.told(self.spec, self.state, self.saved.watch, self._tools.launcher.fixed)
            fields["pool"] = msgspec.json.encode(told).decode()
        if self.state.stage == "done":  # the last word on the state is for `finish`
            del fields["state"]
        self._save(orders, self._changed(fields))

    def _changed(self, fields: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in fields.items() if self._fields.get(name) != value}

    def _save(self, orders: Sequence[e.Phase], fields: dict[str, str]) -> None:
        save(self._bus, self._tools.holder, self.job, self.saved, orders, fields, self._feeder.unsaved)
        self._feeder.saved(self.saved.watch)
        self._fields |= fields

    def _mark_stage(self) -> None:
        if self.state.stage != self._stage:
            self._stage, self._since = self.state.stage, steady.now()

    def _step(self, event: e.Event) -> tuple[machine.Command, ...]:
        """One step of the machine. One that breaks an invariant is not taken: it ends the job with its story."""
        before = self.state
        after, commands = machine.step(before, event)
        try:
            invariants.check(after)
            invariants.check_step(before, event, after, commands)
        except invariants.BrokenInvariant as error:
            self._tools.log.error("%s: %s", self.job, error)
            after, commands = machine.step(
                before, e.Failed(who="scheduler", reason=f"broken invariant: {error}")
            )
        self.saved.state = after
        return commands

    def _event(self, entry: Entry) -> e.Event | None:
        try:
            event: e.Event = unpack(entry, e.Event)
        except BadMessage as error:
            self._tools.log.error("%s: %s", self.job, error)
            letter = {b"key": entry.key.encode(), b"id": entry.id.encode(), b"reason": str(error).encode()}
            self._bus.append(DEAD.at(self.job), letter, cap=10_000)
            return None
        return event

    def _note(self, event: e.Event, at: float) -> None:
        self._lookout.policy.note(event)
        watch = self.saved.watch
        pool.note(event, self.state, watch, steady.now())
        match event:
            case e.WorkerUp(who=who):
                watch.awaited.pop(who, None)
                watch.up[who] = at
            case e.WorkerLost(who=who) if who in self.state.engines:
                watch.awaited.setdefault(who, steady.now())
            case e.ScaleTo(workers=workers) if self.state.pool != workers:
                self._tools.log.warning("%s: %d workers are not taken: it is colocated", self.job, workers)
            case e.SwitchTo(why="plan"):
                watch.plan += 1
            case e.Alarm(update=update, what=what):
                self._bus.hset(JOB.at(self.job), "alarm", f"update {update}: {what}")
            case e.VersionRefused(version=version, active=active, reason=reason):
                story = f"version {version} is not active and never will be, {active} serves on: {reason}"
                self._tools.log.warning("%s: %s", self.job, story)
                self._bus.hset(JOB.at(self.job), "alarm", story)
            case e.Slept(who=who, resident=resident, baseline=baseline) if resident > LEAK * baseline:
                story = "%s: %s sleeps and still holds %d MB, it began with %d MB"
                self._tools.log.warning(story, self.job, who, resident >> 20, baseline >> 20)
                self._bus.hincrby(JOB.at(self.job), "leaks")


def moment(entry: str) -> float:
    """When a stream's entry was appended, in wall-clock seconds, as its id says."""
    return int(entry.partition("-")[0]) / 1000


def phase(order: machine.Order) -> e.Phase:
    """The phase that an order writes, stamped with the time."""
    return e.Phase(**msgspec.structs.asdict(order), at=time.time())


def job_state(state: State) -> e.JobState:
    """What people call the state of a job that runs."""
    if state.stage == "paused":
        return "paused"
    return "starting" if state.active is None else "running"


def begin(tools: Tools, job: str, spec: JobSpec) -> Job:
    """A job's first turn: its first orders, written with its first state."""
    state, commands = machine.begin(spec.schedule.updates, workers(spec), spec.schedule.mode)
    watch = Watch(awaited=dict.fromkeys((*workers(spec), TRAINER), steady.now()))
    begun = Job(tools, job, spec, Saved(state=state, watch=watch))
    begun.write([phase(command) for command in commands if isinstance(command, machine.Order)])
    if spec.reward.source == "http":  # who asks the judge is there before the first response
        tools.bus.zadd(JUDGED.at(), {job: time.time()})
    return begun

"""A model of what is around the machine: engines, sync, ledger, user, a stream that repeats and reorders.

`World.act(choice)` does one of the things that can happen now. The world knows the truth (which engine really
holds memory, what is really in flight), so it can say when the machine was wrong.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from syncline.contract import events as e
from syncline.contract import lag
from syncline.contract.version_path import VersionId

FILES = ("stages", "machine", "invariants", "observe")
HOME = "syncline.scheduler"


class Wrong(AssertionError):
    """The machine let something happen that must not."""


@dataclass
class Machine:
    """The modules under test: the real ones, or mutants of them."""

    stages: ModuleType
    machine: ModuleType
    invariants: ModuleType
    observe: ModuleType


def real() -> Machine:
    return Machine(*(importlib.import_module(f"{HOME}.{name}") for name in FILES))


def mutated(file: str, old: str, new: str) -> Machine:
    """The modules with one text replaced. Raises if `old` does not occur exactly once."""
    made = []
    for name in FILES:
        origin = importlib.import_module(f"{HOME}.{name}").__file__
        assert origin is not None
        text = Path(origin).read_text()
        if name == file:
            if text.count(old) != 1:
                raise LookupError(f"{file}.py holds {text.count(old)} times: {old}")
            text = text.replace(old, new)
        for other in FILES:
            text = text.replace(f"from {HOME}.{other} import", f"from _mutant_{other} import")
        module = ModuleType(f"_mutant_{name}")
        sys.modules[module.__name__] = module
        exec(compile(text, f"mutant of {name}.py", "exec"), module.__dict__)
        made.append(module)
    return Machine(*made)


@dataclass
class Process:
    """One engine as it really is."""

    name: str
    incarnation: int = 0
    alive: bool = True
    told: bool = False  # its WorkerUp is on its way
    reading: Any = None  # an order that it has read and not obeyed yet; a newer one may be out already
    seen: int = 0  # number of the newest order that it has obeyed
    awake: bool = False
    made: bool = False  # trainer: an update since it last woke
    leaving: bool = False  # the launcher has told it to end
    ended: bool = False  # trainer: it has made the last update in this life
    updating: list[int] | None = None  # trainer: groups claimed
    emptied: int = 0  # number of the order under which it last said that it holds nothing


@dataclass
class Group:
    oldest: int | None = None
    by: str | None = None  # worker that samples it now
    state: Literal["waiting", "begun", "ready", "claimed", "trained", "dropped"] = "waiting"


@dataclass
class World:
    """Everything around the machine. `batch` groups an update, each group one trajectory."""

    on: Machine
    updates: int
    mode: e.Mode
    max_lag: int
    slow: str = ""  # a process that seldom reads its orders
    deaf: str = ""  # a process that does not read them now
    still: str = ""  # a worker that begins nothing now
    workers: tuple[str, ...] = ("w0", "w1")
    batch: int = 2
    orders: list[Any] = field(default_factory=list)
    log: list[e.Event] = field(default_factory=list)
    coming: list[e.Event] = field(default_factory=list)  # sent and not delivered
    past: list[e.Event] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    minted: VersionId | None = None
    epoch: int = 0
    active: VersionId | None = None
    refused: VersionId | None = None  # the newest that a proof refused: it is never active
    allowed: bool = False
    result: Any = None
    lags: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processes = {name: Process(name) for name in (*self.workers, "trainer")}
        self.state, commands = self.on.machine.begin(self.updates, self.workers, self.mode)
        self.first = self.state
        self.perform(commands)

    # ---- the machine ---------------------------------------------------------------------------------------
    def launch(self) -> None:
        """What the launcher does at once: start what is wanted and not there, tell to end what is not wanted."""
        wanted = [self.on.stages.worker(i) for i in range(self.on.stages.kept(self.state))]
        for name in wanted:
            there = self.processes.get(name)
            if there is None:
                self.processes[name] = Process(name)
            elif there.leaving and there.alive:
                there.leaving = False
                self.kill(there)
        for name, process in self.processes.items():
            process.leaving = name not in wanted and name != "trainer"

    def deliver(self, event: e.Event) -> None:
        before = self.state
        self.log.append(event)
        self.state, commands = self.on.machine.step(before, event)
        self.on.invariants.check(self.state)
        self.on.invariants.check_step(before, event, self.state, commands)
        if self.on.stages.counted(self.state) != self.state:
            raise Wrong(f"acknowledgements are miscounted after {event}: {self.state}")
        self.perform(commands)
        self.launch()
        self.judge()

    def _deliver_nth(self, i: int) -> None:
        self.deliver(self.coming.pop(i))

    def perform(self, commands: tuple[Any, ...]) -> None:
        for command in commands:
            if isinstance(command, self.on.machine.Order):
                self.orders.append(command)
            elif isinstance(command, self.on.machine.Allow):
                self.allowed = command.submit
            else:
                self.result = command

    def judge(self) -> None:
        """Raise `Wrong` for what the world itself shows."""
        awake = {p.name for p in self.processes.values() if p.alive and p.awake}
        if self.orders[-1].mode == "colocated" and "trainer" in awake and len(awake) > 1:
            raise Wrong(f"awake together on one device: {sorted(awake)}")
        if self.orders[-1].rollout == "asleep" and self.orders[-1].phase != "done" and self.in_flight():
            raise Wrong("a request is in flight under an order to sleep")
        if self.lags and max(self.lags) > self.max_lag:
            raise Wrong(f"trained with lag {max(self.lags)}")

    # ---- what is true --------------------------------------------------------------------------------------
    def in_flight(self) -> int:
        return sum(g.state == "begun" for g in self.groups)

    def version(self) -> int:
        return -1 if self.minted is None else self.minted.number

    def started(self) -> dict[int, int]:
        return {
            i: g.oldest
            for i, g in enumerate(self.groups)
            if g.oldest is not None and g.state in ("begun", "ready", "waiting")
        }

    def claim(self) -> list[int] | None:
        if self.minted is None or self.version() >= self.updates:
            return None
        ready = [
            (i, g.oldest) for i, g in enumerate(self.groups) if g.state == "ready" and g.oldest is not None
        ]
        return lag.claim(ready, self.started(), self.version(), self.batch, self.max_lag)

    def view(self) -> Any:
        states = [g.state for g in self.groups]
        return self.on.observe.Seen(
            in_flight=self.in_flight(),
            ready=states.count("ready"),
            claimable=self.claim() is not None,
            claimed="claimed" in states,
            open=len(states) - states.count("trained") - states.count("dropped"),
            unclaimed=sum(s in ("waiting", "begun", "ready") for s in states),
            updates_claimed=(states.count("trained") + states.count("claimed")) // self.batch,
        )

    # ---- what may happen -----------------------------------------------------------------------------------
    def productive(self) -> list[Callable[[], None]]:
        """Things that bring the job on. In a fair world each that stays possible happens."""
        can: list[Callable[[], None]] = []
        for i in range(len(self.coming)):
            can.append(partial(self._deliver_nth, i))
        for event in self.on.observe.ledger_events(self.state, self.view()):
            if event not in self.coming:
                can.append(partial(self._send, event))
        if self.allowed and self.on.observe.room(self.state, self.view(), self.batch, self.max_lag):
            can.append(lambda: self.groups.append(Group()))
        for p in list(self.processes.values()):
            can.extend(self._of_leaver(p) if p.leaving else self._of_process(p))
        if self._may_activate():
            can.append(self._activate)
        return can

    def _of_leaver(self, p: Process) -> list[Callable[[], None]]:
        """It has heard that it must end: it reads nothing more, and others begin anew what it holds."""
        if p.alive:
            return [lambda: self.kill(p, seen=False)]
        return [lambda: self._left(p)]

    def _left(self, p: Process) -> None:
        event = e.WorkerLeft(who=p.name, seq=self.state.seq)
        del self.processes[p.name]
        self._send(event)

    def _too_many(self, p: Process) -> bool:
        """Whether the order that it knows says that it leaves."""
        return bool(p.seen) and p.name != "trainer" and int(p.name[1:]) >= self.orders[p.seen - 1].workers

    def _of_process(self, p: Process) -> list[Callable[[], None]]:
        if not p.alive:
            return [lambda: self._restart(p)]
        if not p.told:
            return [lambda: self._say_up(p)]
        can: list[Callable[[], None]] = []
        newest = self.orders[-1]
        if p.reading is not None and p.updating is None and self._may_obey(p, p.reading):
            can.append(lambda: self._obey(p, p.reading))
        elif p.reading is None and p.seen < newest.seq and p.name != self.deaf:
            can.append(lambda: self._read(p, newest))
        if p.name == "trainer":
            return can + self._of_trainer(p)
        holds = any(g.state == "begun" and g.by == p.name for g in self.groups)
        if self._too_many(p) and not holds and p.emptied < p.seen:
            can.append(lambda: self._say_emptied(p))
        for i, g in enumerate(self.groups):
            if g.state == "begun" and g.by == p.name:
                can.append(partial(self._publish, g))
            elif g.state == "waiting" and p.name != self.still and self._may_begin(p, g):
                can.append(partial(self._begin, p, i))
        return can

    def _of_trainer(self, p: Process) -> list[Callable[[], None]]:
        if p.updating is not None:
            return [lambda: self._mint(p)]
        order = self.orders[p.seen - 1] if p.seen else None
        if p.ended and not self.state.finished:
            said = e.Finished(updates=self.version())
            return [] if said in self.coming else [lambda: self._send(said)]
        if not p.awake or order is None:
            return []
        if self.minted is None or self.epoch > self.minted.epoch:
            return [lambda: self._mint(p)]
        once = order.mode == "colocated" and p.made
        return [] if once or self.claim() is None else [lambda: self._claim(p)]

    def disturbing(self) -> list[list[Callable[[], None]]]:
        """Things that hold it up, repeat, or change the user's mind, by kind."""
        alive = [p for p in self.processes.values() if p.alive]
        wishes: list[e.Event] = [
            e.SwitchTo(mode="colocated", why="request"),
            e.SwitchTo(mode="disjoint", why="request"),
            e.Pause(),
            e.Resume(),
            e.Resume(),
        ]
        deaths = [(p, seen) for p in alive for seen in (True, False)]
        return [
            [partial(self._send, w) for w in wishes],
            [partial(self.kill, p, seen) for p, seen in deaths],
            [partial(self._send, event) for event in self.past[-60:]],
            [partial(self._drop, g) for g in self.groups if g.state in ("begun", "ready")],
            [self._refuse] if self._may_refuse() else [],
            [partial(self._send, e.ScaleTo(workers=n, why="request")) for n in (1, 1, 2, 3, 4)],
        ]

    # ---- its doing -----------------------------------------------------------------------------------------
    def _send(self, event: e.Event) -> None:
        self.coming.append(event)
        if not isinstance(event, e.SwitchTo | e.Pause | e.Resume | e.ScaleTo):
            self.past.append(event)

    def _restart(self, p: Process) -> None:
        p.alive, p.told, p.seen, p.emptied, p.incarnation = True, False, 0, 0, p.incarnation + 1

    def _say_up(self, p: Process) -> None:
        p.told = True
        self._send(e.WorkerUp(who=p.name, incarnation=str(p.incarnation)))

    def kill(self, p: Process, seen: bool = True) -> None:
        """Not `seen`: it is back before anyone looks, so its new incarnation is all that tells of it."""
        if seen:
            self._send(e.WorkerLost(who=p.name, exit=-9))
        p.alive, p.awake, p.ended, p.reading = False, False, False, None
        for g in self.groups:
            if (g.state == "begun" and g.by == p.name) or (g.state == "claimed" and p.name == "trainer"):
                g.state, g.by = ("waiting" if g.state == "begun" else "ready"), None
        p.updating = None
        if p.name == "trainer":
            self.epoch += 1

    def _may_obey(self, p: Process, order: Any) -> bool:
        """An engine that is told to sleep first ends what it has begun."""
        return order.rollout == "awake" or not any(g.by == p.name and g.state == "begun" for g in self.groups)

    def _read(self, p: Process, order: Any) -> None:
        p.reading = order

    def _obey(self, p: Process, order: Any) -> None:
        was, p.seen, p.reading = p.awake, order.seq, None
        p.awake = (order.trainer if p.name == "trainer" else order.rollout) == "awake"
        p.made = p.made and was and p.awake
        if p.awake:
            self._send(e.Woke(who=p.name, seq=order.seq, version=self.active, resident=1, seconds=0.1))
        else:
            self._send(e.Slept(who=p.name, seq=order.seq, resident=1, baseline=1))
        self.judge()

    def _say_emptied(self, p: Process) -> None:
        p.emptied = p.seen
        self._send(e.Emptied(who=p.name, seq=p.seen))

    def _may_begin(self, p: Process, g: Group) -> bool:
        if self._too_many(p):
            return False
        if not p.awake or self.active is None or self.orders[p.seen - 1].gate == "shut":
            return False
        if g.oldest is not None:
            return True
        last = (
            max(0, self.version())
            if any(x.state == "claimed" for x in self.groups)
            else max(0, self.version()) - 1
        )
        return lag.may_start(self.active.number, self.started().values(), last, self.batch, self.max_lag)

    def _begin(self, p: Process, i: int) -> None:
        g = self.groups[i]
        assert self.active is not None
        g.state, g.by, g.oldest = "begun", p.name, self.active.number if g.oldest is None else g.oldest

    def _publish(self, g: Group) -> None:
        g.state, g.by = "ready", None

    def _drop(self, g: Group) -> None:
        g.state, g.by = "dropped", None

    def _claim(self, p: Process) -> None:
        p.updating = self.claim()
        for i in p.updating or ():
            self.groups[i].state = "claimed"

    def _mint(self, p: Process) -> None:
        for i in p.updating or ():
            oldest = self.groups[i].oldest
            assert oldest is not None
            self.lags.append(self.version() - oldest)
            self.groups[i].state = "trained"
        number = self.version() + 1 if p.updating is not None or self.minted is None else self.version()
        p.updating, p.made, p.ended = None, True, number >= self.updates
        self.minted = VersionId(self.epoch, number)
        self._send(e.Minted(version=self.minted))

    def _may_activate(self) -> bool:
        fleet = [p for p in self.processes.values() if p.name != "trainer" and p.alive]
        new = self.minted is not None and (self.active is None or self.active < self.minted)
        new = new and self.refused != self.minted
        return new and bool(fleet) and all(p.awake for p in fleet)

    def _activate(self) -> None:
        assert self.minted is not None
        self.active = self.minted
        self._send(e.Active(version=self.active, workers=self.workers))

    def _may_refuse(self) -> bool:
        """Sync says so of a version that the job can do without until the next one."""
        if self.minted is None or self.active is None or not self.active < self.minted:
            return False
        ahead = self.minted.number - self.active.number
        return self.refused != self.minted and self.minted.number < self.updates and ahead <= self.max_lag

    def _refuse(self) -> None:
        assert self.minted is not None
        assert self.active is not None
        self.refused = self.minted
        self._send(e.VersionRefused(version=self.minted, active=self.active, reason="level 6"))

    # ---- runs ----------------------------------------------------------------------------------------------
    def act(self, dice: random.Random, calm: int, taste: int) -> None:
        """One thing that can happen; about one in `calm` is a disturbance. `taste`: a kind of them, 0: all."""
        self.deaf = self.slow if dice.randrange(8) else ""
        can = self.productive()
        if not can or dice.randrange(calm) == 0:
            kinds = [kind for kind in self.disturbing() if kind]
            can = kinds[taste - 1] if 0 < taste <= len(kinds) else dice.choice(kinds)
        dice.choice(can)()
        self.judge()

    def fair(self, over: Callable[[], bool], limit: int = 6000, still: str = "") -> None:
        """No more disturbances; everything that can happen does, until `over` or nothing can.

        still   a worker that neither reads orders nor begins anything
        """
        self.deaf = self.still = still
        for turn in range(limit):
            can = self.productive()
            if over() or not can:
                return
            can[turn * 7 % len(can)]()
            self.judge()
        raise Wrong(f"circling in {self.state.stage}: {self.state}")

    def wake_up(self, name: str) -> None:
        """A worker that was still begins all that it may under the order that it knows."""
        worker, self.still = self.processes[name], ""
        for i, group in enumerate(self.groups):
            if worker.alive and worker.told and group.state == "waiting" and self._may_begin(worker, group):
                self._begin(worker, i)
        self.judge()

    def settle(self, stop: Callable[[], bool] | None = None) -> None:
        """A paused job is resumed, and then goes to its good end, or to where `stop` holds."""
        self.coming = [event for event in self.coming if not isinstance(event, e.Pause)]
        self.coming.append(e.Resume())
        self.fair(lambda: self.result is not None or (stop is not None and stop()))
        if stop is not None and stop():
            return
        if self.result is None:
            raise Wrong(f"stuck in {self.state.stage}: {self.state}")
        if self.result.state != "succeeded" or self.version() < self.updates:
            raise Wrong(f"a fair world ends in {self.result} after {self.version()} updates")

    def rest(self) -> None:
        """A paused job comes to rest with nothing awake and nothing in flight, or has ended."""
        self.coming = [event for event in self.coming if not isinstance(event, e.Resume)]
        self.coming.append(e.Pause())
        self.fair(lambda: self.result is not None)
        awake = [p.name for p in self.processes.values() if p.awake]
        if self.result is None and (self.state.stage != "paused" or awake or self.in_flight()):
            raise Wrong(f"a paused job rests in {self.state.stage} with {awake} awake")

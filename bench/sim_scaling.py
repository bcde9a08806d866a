"""A simulated disjoint job whose pool the real policy scales: `python bench/sim_scaling.py` prints runs of it.

The policy decides from the same facts as in a service: how long the trainer waited for each batch, and how long workers
ran requests meanwhile. A worker that comes takes time to start and then stages the newest version; one that leaves ends
what it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec.structs import replace
from sim_cases import Case, Fleet
from sim_workers import Group, Running, Worker
from sim_world import World

from syncline.contract import events as e
from syncline.scheduler import machine, stages
from syncline.scheduler.saved import Size
from syncline.scheduler.scaling import Share, decide, turns
from syncline.sync import state as s


class Scaling(World):
    """A disjoint run that begins with the fleet's workers and may have from `least` to `most`.

    train   seconds of training of the update
    start   seconds until a new worker reports for duty
    """

    def __init__(
        self, case: Case, updates: int, bounds: tuple[int, int], train: Callable[[int], float], start: float
    ) -> None:
        self._bounds, self._train_seconds, self._start = bounds, train, start
        self.sizes = [Size(update=0, workers=case.fleets["disjoint"].workers)]
        self.shares: list[Share] = []
        self.worked: dict[str, float] = {}  # worker -> seconds in which it ran requests
        self._since: dict[str, float] = {}  # worker -> when its present stretch began
        self._before: dict[str, float] = {}
        super().__init__(case, "disjoint", updates)
        self.fleet = replace(self.fleet, train=train(0))

    # ---- who comes and leaves --------------------------------------------------------------------------------
    def _perform(self, commands: tuple[machine.Command, ...]) -> None:
        super()._perform(commands)
        for number in range(self.state.pool):
            name = stages.worker(number)
            known = self.workers.get(name)
            if known is None or (not known.alive and known.life < 0):
                life = 0 if known is None else -known.life
                self.workers[name] = Worker(name, self.case.slots, 1.0, alive=False, life=life)
                self.after(self._start, partial(self._back, self.workers[name]))

    def _worker_turned(self, worker: Worker, life: int, order: machine.Order) -> None:
        super()._worker_turned(worker, life, order)
        if worker.life == life and stages.number(worker.name) >= order.workers:
            worker.gate = False
            self._may_leave(worker)

    def _may_leave(self, worker: Worker) -> None:
        if worker.running or stages.number(worker.name) < self.order.workers or not worker.alive:
            return
        self.tell(e.Emptied(who=worker.name, seq=self.order.seq))
        worker.die()
        worker.life = -worker.life  # the next one of this name begins behind it
        self._post(s.Lost(worker=worker.name))
        self.tell(e.WorkerLeft(who=worker.name, seq=self.order.seq))

    # ---- what is measured ------------------------------------------------------------------------------------
    def _begin(self, worker: Worker, group: Group, member: int) -> None:
        if not worker.running:
            self._since[worker.name] = self.now
        super()._begin(worker, group, member)

    def _end(self, worker: Worker, life: int, request: Running) -> None:
        super()._end(worker, life, request)
        if worker.life == life and not worker.running and worker.name in self._since:
            spent = self.now - self._since.pop(worker.name)
            self.worked[worker.name] = self.worked.get(worker.name, 0.0) + spent
            self._may_leave(worker)

    def _worked(self, name: str) -> float:
        return self.worked.get(name, 0.0) + self.now - self._since.get(name, self.now)

    def _mint(self) -> None:
        super()._mint()
        self.fleet = replace(self.fleet, train=self._train_seconds(self.minted))
        names = [worker.name for worker in self.workers.values() if worker.alive]
        worked = {name: self._worked(name) for name in names}
        if len(self.mints) > 2 and len(names) == self.state.pool and set(names) == set(self._before):
            whole = self.mints[-1] - self.mints[-2]
            busy = sum(worked[name] - self._before[name] for name in names) / len(names) / whole
            trained = self._train_seconds(self.minted - 1)
            self.shares.append(Share(waited=max(0.0, 1 - trained / whole), busy=busy))
        else:
            self.shares = []
        self._before = worked
        self._wish()

    def _wish(self) -> None:
        wanted = decide(self.shares, self.sizes, self.minted, self._bounds, self.updates - self.minted)
        if wanted != self.state.pool and self.state.stage == "flow":
            self.sizes.append(Size(update=self.minted, workers=wanted))
            self.shares = []
            self.tell(e.ScaleTo(workers=wanted, why="policy"))


SMALL = Case(
    name="small",
    source="none: made up",
    assumed="all of it: sampling takes some 85 worker-seconds an update, training 20 s",
    groups=16,
    members=4,
    median=1000,
    sigma=0.3,
    longest=4000,
    token=0.02,
    slots=16,
    fleets={"disjoint": Fleet(workers=2, train=20.0, publish=1.0, stage=2.0, commit=0.1)},
    max_lag=2,
)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A run. `step`: seconds of an update, the mean of the last 40."""

    name: str
    sizes: list[Size]
    step: float
    turns: int
    largest_lag: int
    updates: int


def told(name: str, updates: int, bounds: tuple[int, int], slower: int, workers: int = 2) -> Told:
    """A run of `SMALL` whose training takes 20 s, and from update `slower` on three times as long."""
    fleet = replace(SMALL.fleets["disjoint"], workers=workers)
    case = replace(SMALL, fleets={"disjoint": fleet})
    run = Scaling(case, updates, bounds, lambda update: 20.0 if update < slower else 60.0, start=40.0)
    run.run()
    last = run.mints[-41:]
    return Told(
        name=name,
        sizes=run.sizes,
        step=(last[-1] - last[0]) / (len(last) - 1),
        turns=turns(run.sizes),
        largest_lag=max(run.lags),
        updates=len(run.mints) - 1,
    )


def main() -> None:
    """The runs of docs/scale.md, as JSON."""
    runs = (
        told("2 workers", 80, (2, 2), 80),
        told("5 workers", 80, (5, 5), 80, workers=5),
        told("1 to 8 workers", 80, (1, 8), 80),
        told("1 to 8 workers, slower training from update 60", 160, (1, 8), 60),
    )
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")


if __name__ == "__main__":
    main()

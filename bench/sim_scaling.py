"""A simulated disjoint job whose pool of workers the real policy scales: `sim_world.World` with `scheduler.scaling`.

The policy decides from the same facts as in a service: how long the trainer waited for each batch, and how long workers
ran requests meanwhile. A worker that comes takes time to start and then stages the newest version; one that leaves ends
what it runs.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace
from sim_cases import Case
from sim_workers import Group, Running, Worker
from sim_world import World

from syncline.contract import events as e
from syncline.scheduler import machine, stages
from syncline.scheduler.saved import Size
from syncline.scheduler.scaling import Share, decide
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
                self.after(self._start, lambda worker=self.workers[name]: self._back(worker))  # type: ignore[misc]

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

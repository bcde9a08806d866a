"""One job in virtual time: the real scheduler machine, lag bound and activation machine among simulated engines.

Real is what decides: `scheduler.machine.step` with its invariants, `scheduler.observe`, `contract.lag`, and
`sync.decide.steps`. Simulated is what takes time: engines that decode, trainers, transfers, failures. Nothing is random
but the lengths, who is slow and who fails, all from one seed.

The scheduler, the trainer and sync look every `LOOK` virtual seconds if anything happened, as the services do.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace
from sim_cases import Case, Mode
from sim_workers import Group, Running, Worker

from syncline.contract import events as e
from syncline.contract import lag
from syncline.contract.version_path import Ack, VersionId
from syncline.scheduler import invariants, machine
from syncline.scheduler.observe import ledger_events, room, seen
from syncline.scheduler.stages import TRAINER
from syncline.sync import state as s
from syncline.sync.decide import steps

LOOK = 0.5
MAIL = 100  # answers that sync reads at once


class World:
    """A run of `updates` updates in one mode. `run` it; then its figures are what happened."""

    def __init__(self, case: Case, mode: Mode, updates: int, seed: int = 0) -> None:
        self.case, self.mode, self.updates, self.fleet = case, mode, updates, case.fleets[mode]
        self.dice = random.Random(seed)
        self.now, self._count = 0.0, 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        slow = round(case.slow_share * self.fleet.workers)
        self.workers = {
            f"w{i}": Worker(f"w{i}", case.slots, case.slow_by if i < slow else 1.0)
            for i in range(self.fleet.workers)
        }
        self.free = deque(self.workers.values())  # workers that may have a free slot
        self.groups: dict[int, Group] = {}
        self.waiting: deque[tuple[Group, int]] = deque()  # members that nobody samples
        self.submitted = self.minted = -1
        self.claimed: list[Group] | None = None
        self.claimed_version = -1
        self.allowed = self.changed = False
        self.awake, self.made, self.told_end = False, False, False  # the trainer
        self.dull: tuple[int, int] | None = None  # (version, groups) at which the bound let none begin
        self.oldest: Counter[int] = Counter()  # unclaimed groups by oldest version: the ledger's sums
        self.mail: deque[s.Event] = deque()
        self.sync = s.State(
            wait=600.0, seq=-1, scope="barrier" if mode == "colocated" else "rolling", awake=True
        )
        self.wanted: s.Wanted | None = None  # as sync was last told
        # what is measured
        self.lags: Counter[int] = Counter()
        self.tokens = self.lost = self.failures = 0
        self.mints: list[float] = []
        self.actives: dict[int, list[float]] = {}
        self.spent: defaultdict[str, float] = defaultdict(float)  # CPU seconds of the real parts
        self.decisions: Counter[str] = Counter()
        self.busy = self.training = 0.0  # slot seconds; trainer seconds
        self.orders: list[s.Order] = []
        self.phases = 0
        with self._charged("machine"):
            self.state, commands = machine.begin(updates, tuple(self.workers), mode)
        self.order = next(c for c in commands if isinstance(c, machine.Order))
        for worker in self.workers.values():
            self._may_fail(worker)
            self._answer(worker, Ack(worker=worker.name, incarnation="0", kind="joined", version=None))
        self._perform(commands)
        self.after(LOOK, self._look)

    # ---- time ------------------------------------------------------------------------------------------------
    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, what))

    def run(self, limit: float = 1e8) -> None:
        """To the job's end. Raises `RuntimeError` if it does not come."""
        while self._heap and self.state.stage != "done":
            self.now, _, what = heapq.heappop(self._heap)
            what()
            if self.now > limit:
                break
        if self.state.result is None or self.state.result.state != "succeeded":
            raise RuntimeError(
                f"{self.case.name}, {self.mode}: {self.state.stage} at {self.now:.0f} s: {self.state.result}"
            )

    @contextmanager
    def _charged(self, what: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.spent[what] += time.thread_time() - began
        self.decisions[what] += 1

    # ---- scheduler -------------------------------------------------------------------------------------------
    def tell(self, event: e.Event) -> None:
        before = self.state
        with self._charged("machine"):
            self.state, commands = machine.step(before, event)
            invariants.check(self.state)
            invariants.check_step(before, event, self.state, commands)
        self._perform(commands)

    def _perform(self, commands: tuple[machine.Command, ...]) -> None:
        for command in commands:
            if isinstance(command, machine.Order):
                self.order, self.phases = command, self.phases + 1
                self._wanted()
                self.after(LOOK / 2, lambda order=command: self._obey(order))  # type: ignore[misc]
            elif isinstance(command, machine.Allow):
                self.allowed = command.submit
        self.changed = True

    def _look(self) -> None:
        if self.changed:
            self.changed = False
            self._read_mail()
            self._watch_ledger()
            self._train()
            self._begin_work()
        if self.state.stage != "done":
            self.after(LOOK, self._look)

    def _watch_ledger(self) -> None:
        if self.state.stage not in ("sample", "drain", "train", "flow"):
            return
        case = self.case
        with self._charged("ledger view"):
            table = {name: group.line() for name, group in self.groups.items()}
            view = seen(table, (), self.claimed_version, self.minted, case.groups, case.max_lag, "wait")
            view = replace(view, in_flight=self._in_flight())
        for event in ledger_events(self.state, view):
            self.tell(event)
        if self.allowed:
            for _ in range(room(self.state, view, case.groups, case.max_lag)):
                self._submit()

    def _submit(self) -> None:
        self.submitted += 1
        lengths = [self._length() for _ in range(self.case.members)]
        group = self.groups[self.submitted] = Group(self.submitted, lengths)
        self.waiting.extend((group, i) for i in range(len(lengths)))
        self.changed = True

    def _length(self) -> int:
        drawn = self.case.median * self.dice.lognormvariate(0.0, self.case.sigma)
        return max(1, min(self.case.longest, int(drawn)))

    def _in_flight(self) -> int:
        return sum(len(worker.running) for worker in self.workers.values())

    # ---- orders to engines -----------------------------------------------------------------------------------
    def _obey(self, order: machine.Order) -> None:
        if order.seq != self.order.seq:
            return  # a newer one is out, and engines obey the newest alone
        for worker in self.workers.values():
            self._worker_obeys(worker, order)
        delay = self._turning(self.awake, order.trainer == "awake")
        self.after(delay, lambda: self._trainer_obeys(order))

    def _turning(self, was: bool, now: bool) -> float:
        return 0.0 if was == now else self.fleet.wake if now else self.fleet.sleep

    def _worker_obeys(self, worker: Worker, order: machine.Order) -> None:
        if not worker.alive:
            return
        delay = self._turning(worker.awake, order.rollout == "awake") * (1 + 0.1 * self.dice.random())
        life = worker.life
        self.after(delay, lambda: self._worker_turned(worker, life, order))

    def _worker_turned(self, worker: Worker, life: int, order: machine.Order) -> None:
        if worker.life != life:
            return
        worker.awake, worker.seq = order.rollout == "awake", order.seq
        worker.gate = order.gate == "open"
        if worker.awake:
            version = None if worker.version < 0 else VersionId(0, worker.version)
            self.tell(e.Woke(who=worker.name, seq=order.seq, version=version, resident=1, seconds=0.0))
            self.free.append(worker)
        else:
            self.tell(e.Slept(who=worker.name, seq=order.seq, resident=1, baseline=1))

    def _trainer_obeys(self, order: machine.Order) -> None:
        if self.claimed is not None or order.seq != self.order.seq:
            if self.claimed is not None:
                self.after(LOOK, lambda: self._trainer_obeys(order))
            return
        was, self.awake = self.awake, order.trainer == "awake"
        self.made = self.made and was and self.awake
        if self.awake:
            self.tell(e.Woke(who=TRAINER, seq=order.seq, version=None, resident=1, seconds=0.1))
            if self.minted < 0:
                self._mint()
        else:
            self.tell(e.Slept(who=TRAINER, seq=order.seq, resident=1, baseline=1))

    # ---- trainer ---------------------------------------------------------------------------------------------
    def _train(self) -> None:
        if (
            not self.awake
            or self.claimed is not None
            or self.minted < 0
            or (self.mode == "colocated" and self.made)
        ):
            return
        if self.minted >= self.updates:
            if not self.told_end:
                self.told_end = True
                self.tell(e.Finished(updates=self.minted))
            return
        ready = [(name, group.oldest) for name, group in self.groups.items() if group.ready]
        begun = {name: group.oldest for name, group in self.groups.items() if group.oldest >= 0}
        with self._charged("claim"):
            chosen = lag.claim(ready, begun, self.minted, self.case.groups, self.case.max_lag)
        if chosen is None:
            return
        self.claimed, self.claimed_version = [self.groups.pop(name) for name in chosen], self.minted
        for group in self.claimed:
            self.lags[self.minted - group.oldest] += len(group.lengths)
            self.oldest[group.oldest] -= 1
            self.tokens += sum(group.lengths)
        self.dull, self.changed = None, True
        self.training += self.fleet.train
        self.after(self.fleet.train, self._mint)

    def _mint(self) -> None:
        self.claimed, self.made = None, True
        self.minted += 1
        self.mints.append(self.now)
        version = VersionId(0, self.minted)
        self.tell(e.Minted(version=version))
        self.mail.append(s.Minted(version=version))
        published = s.Published(version=version, digest="m", loaded="l", canaries=False, tolerance=0.0)
        self.after(self.fleet.publish, lambda: self._post(published))
        self._train()

    def _post(self, event: s.Event) -> None:
        self.mail.append(event)
        self.changed = True

    # ---- rollout ---------------------------------------------------------------------------------------------
    def _begin_work(self) -> None:
        for _ in range(len(self.free)):
            worker = self.free.popleft()
            if not (worker.alive and worker.awake and worker.gate and worker.version >= 0):
                continue  # it comes again when that has changed
            while worker.slots > len(worker.running) and self.waiting:
                group, member = self.waiting[0]
                if group.oldest < 0 and not self._may_start(worker.version):
                    break
                self.waiting.popleft()
                self._begin(worker, group, member)
            if worker.slots > len(worker.running):
                self.free.append(worker)

    def _may_start(self, version: int) -> bool:
        begun = sum(self.oldest.values())
        if self.dull == (version, begun):
            return False
        with self._charged("admission"):
            allowed = lag.may_start(
                version, self.oldest.elements(), self.claimed_version, self.case.groups, self.case.max_lag
            )
        self.dull = None if allowed else (version, begun)
        return allowed

    def _begin(self, worker: Worker, group: Group, member: int) -> None:
        if group.oldest < 0:
            group.oldest = worker.version
            self.oldest[worker.version] += 1
        request = Running(group, member, worker.paused)
        worker.running[(group.name, member)] = request
        seconds = group.lengths[member] * self.case.token * worker.slow
        self.busy += seconds
        life = worker.life
        self.after(seconds, lambda: self._end(worker, life, request))

    def _end(self, worker: Worker, life: int, request: Running) -> None:
        if worker.life != life:
            return
        if worker.paused > request.paused:  # decoding stood still meanwhile
            late, request.paused = worker.paused - request.paused, worker.paused
            self.after(late, lambda: self._end(worker, life, request))
            return
        del worker.running[(request.group.name, request.member)]
        request.group.done += 1
        self.free.append(worker)
        self.changed = True

    # ---- sync ------------------------------------------------------------------------------------------------
    def _wanted(self) -> None:
        scope: s.Scope = "barrier" if self.order.mode == "colocated" else "rolling"
        wanted = s.Wanted(scope=scope, awake=self.order.rollout == "awake")
        if wanted != self.wanted:
            self.wanted = wanted
            self.mail.append(wanted)

    def _answer(self, worker: Worker, ack: Ack) -> None:
        self.mail.append(s.Acked(ack=ack))
        self.changed = True

    def _read_mail(self) -> None:
        while self.mail:
            events = [self.mail.popleft() for _ in range(min(MAIL, len(self.mail)))]
            with self._charged("sync"):
                self.sync, effects = steps(self.sync, events, self.now)
            self.decisions["sync answers"] += len(events)
            for effect in effects:
                if isinstance(effect, s.Order):
                    self.orders.append(effect)
                    for name in effect.workers:
                        self._ordered(self.workers[name], effect)
                elif isinstance(effect, s.Ended) and effect.how == "active":
                    self.tell(e.Active(version=effect.version, workers=effect.workers[:8]))

    def _ordered(self, worker: Worker, order: s.Order) -> None:
        life = worker.life
        work = self.fleet.stage if order.order == "stage" else self.fleet.commit
        kind = {"stage": "verified", "commit": "active", "abort": "aborted"}[order.order]
        self.after(
            work * (1 + 0.2 * self.dice.random()) * worker.slow, lambda: self._done(worker, life, order, kind)
        )

    def _done(self, worker: Worker, life: int, order: s.Order, kind: str) -> None:
        if worker.life != life or kind == "aborted":
            return
        if kind == "active":
            worker.version = order.version.number
            worker.paused += self.fleet.commit
            self.actives.setdefault(worker.version, []).append(self.now)
            self.free.append(worker)
        ack = Ack(
            worker=worker.name,
            incarnation=str(worker.life),
            kind="active" if kind == "active" else "verified",
            version=order.version,
            seq=order.seq,
            digest="m",
            loaded_digest="l",
        )
        self._answer(worker, ack)

    # ---- failures --------------------------------------------------------------------------------------------
    def _may_fail(self, worker: Worker) -> None:
        if self.case.mtbf:
            self.after(self.dice.expovariate(1 / self.case.mtbf), lambda: self._fail(worker))

    def _fail(self, worker: Worker) -> None:
        self.failures += 1
        self.lost += len(worker.running)
        self.waiting.extendleft((request.group, request.member) for request in worker.running.values())
        worker.die()
        self.tell(e.WorkerLost(who=worker.name, exit=-9))
        self._post(s.Lost(worker=worker.name))
        self.after(self.case.restart, lambda: self._back(worker))

    def _back(self, worker: Worker) -> None:
        worker.alive = True
        self.tell(e.WorkerUp(who=worker.name, incarnation=str(worker.life)))
        self._answer(
            worker, Ack(worker=worker.name, incarnation=str(worker.life), kind="joined", version=None)
        )
        self._worker_obeys(worker, self.order)
        self._may_fail(worker)

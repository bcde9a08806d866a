"""Random histories: whatever comes in whatever order, the machine keeps its promises.

The monitor below believes only what it sent and what the machine ordered; it never reads the machine's workers to
judge them, except to learn which order an honest worker would answer (a worker knows that from the order itself).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncline.contract.version_path import Ack, VersionId
from syncline.sync.decide import steps
from syncline.sync.state import (
    Acked,
    Broken,
    Ended,
    Event,
    Lost,
    Minted,
    Order,
    Published,
    Reached,
    Scope,
    Seen,
    State,
    Tick,
    Wanted,
)

NAMES = ("w0", "w1", "w2")
WAIT = 10.0
AWAKE = st.sampled_from([True, True, True, False])


class Process:
    """A worker process as it really is: obeys the newest order it got."""

    def __init__(self, name: str, incarnation: str) -> None:
        self.name, self.incarnation = name, incarnation
        self.staging: Order | None = None  # ordered, not yet verified
        self.good: Order | None = None  # verified in truth, and said so
        self.commit: Order | None = None
        self.active: VersionId | None = None
        self.out: VersionId | None = None

    def obey(self, order: Order) -> None:
        if self.active is not None:
            assert order.order == "abort" or order.version >= self.active, "a version falls"
        match order.order:
            case "stage":
                assert self.commit is None or self.commit.version <= order.version
                self.staging, self.good, self.commit, self.out = order, None, None, None
            case "commit":
                assert self.good is not None, "commit of what was not verified"
                assert self.good.version == order.version
                self.commit, self.good = order, None
            case "abort":
                self.staging, self.good = None, None
                self.out = order.version


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0
        self.processes: dict[str, Process] = {}
        self.dead: list[Process] = []
        self.count = 0
        self.epoch, self.number = 0, -1
        self.minted: list[VersionId] = []
        self.published: dict[VersionId, Published] = {}
        self.ended: dict[VersionId, str] = {}
        self.began: set[VersionId] = set()  # a commit was ordered
        self.sent: list[Ack] = []
        self.seq = -1
        self.gathering = False
        self.gathered: list[Event] = []

    @initialize(scope=st.sampled_from(["barrier", "rolling"]), awake=AWAKE, workers=st.integers(0, 3))
    def begin(self, scope: Scope, awake: bool, workers: int) -> None:
        self.state = State(wait=WAIT, seq=-1, scope=scope, awake=awake)
        for name in NAMES[:workers]:
            self.join(name)

    # ---- telling and judging ----
    def tell(self, event: Event) -> None:
        if self.gathering:
            self.gathered.append(event)
        else:
            self.tell_all([event])

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is told inside is told in one step at the end. Of one worker no two that answer each other."""
        self.gathering = True
        yield
        self.gathering = False
        events, self.gathered = self.gathered, []
        self.tell_all(events)

    def tell_all(self, events: Sequence[Event]) -> None:
        self.state, effects = steps(self.state, events, self.at)
        minted = {event.version for event in events if isinstance(event, Minted)}
        lost = any(isinstance(event, Lost) for event in events)
        for effect in effects:
            if isinstance(effect, Order):
                assert effect.seq == self.seq + 1
                self.seq = effect.seq
                self.judge_scope(effect)
                for name in effect.workers:
                    if name in self.processes or not lost:  # an order to one that is lost reaches nobody
                        self.processes[name].obey(effect)
            if isinstance(effect, Ended):
                if effect.version in minted:
                    assert (
                        effect.how == "superseded"
                    )  # an old one told again: the machine keeps no list of all
                    self.ended.setdefault(effect.version, effect.how)
                    continue
                assert effect.version not in self.ended, "a version ends twice"
                self.ended[effect.version] = effect.how
                if effect.how == "active":
                    assert effect.workers
                    assert {self.processes[w].active for w in effect.workers} == {effect.version}
            if isinstance(effect, Reached) and effect.what == "out" and effect.worker in self.processes:
                self.processes[effect.worker].out = effect.version

    def judge_scope(self, order: Order) -> None:
        """The first commit of a version in a barrier goes out only when all in rotation have verified it."""
        if order.order != "commit":
            return
        assert self.state.awake, "ordered while rollout sleeps"
        if self.state.scope == "barrier" and order.version not in self.began:
            for process in self.processes.values():
                verified = process.good is not None and process.good.version == order.version
                out = process.out is not None and process.out >= order.version
                assert verified or process.active == order.version or out
        self.began.add(order.version)

    def ack(self, process: Process, kind: str, order: Order, **more: object) -> None:
        ack = Ack(
            worker=process.name,
            incarnation=process.incarnation,
            kind=kind,  # type: ignore[arg-type]
            version=order.version,
            seq=order.seq,
            **more,  # type: ignore[arg-type]
        )
        self.sent.append(ack)
        self.tell(Acked(ack=ack))

    # ---- the trainer ----
    @rule(step_epoch=st.integers(0, 1), skip=st.integers(1, 2), publish=st.booleans())
    def mint(self, step_epoch: int, skip: int, publish: bool) -> None:
        self.epoch += step_epoch
        self.number = max(0, self.number + (skip if not step_epoch else -skip))
        version = VersionId(self.epoch, self.number)
        self.minted.append(version)
        self.tell(Minted(version=version))
        if publish:
            self.publish(version)

    def publish(self, version: VersionId) -> None:
        self.published[version] = Published(
            version=version,
            digest=f"m{version}",
            loaded=f"l{version}",
            canaries=version.number % 2 == 0,
            tolerance=0.5,
        )
        self.tell(self.published[version])

    @precondition(lambda self: self.minted and self.minted[-1] not in self.ended)
    @rule(broken=st.booleans())
    def convert(self, broken: bool) -> None:
        if self.minted[-1] in self.published:
            self.tell(self.published[self.minted[-1]])  # twice
        elif broken:
            self.tell(Broken(version=self.minted[-1], reason="no"))
        else:
            self.publish(self.minted[-1])

    @precondition(lambda self: len(self.minted) > 1)
    @rule(index=st.integers(0, 5))
    def mint_again(self, index: int) -> None:
        version = self.minted[index % (len(self.minted) - 1)]
        ended = dict(self.ended)
        try:
            self.tell(Minted(version=version))
        finally:
            assert self.ended.keys() - ended.keys() <= {version}

    # ---- workers ----
    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name in self.processes:
            self.dead.append(self.processes[name])
        self.count += 1
        process = self.processes[name] = Process(name, f"i{self.count}")
        ack = Ack(worker=name, incarnation=process.incarnation, kind="joined", version=None)
        self.sent.append(ack)
        self.tell(Acked(ack=ack))

    @rule(name=st.sampled_from(NAMES))
    def seen(self, name: str) -> None:
        if name in self.processes:
            process = self.processes[name]
            version = process.active
            self.tell(
                Seen(
                    worker=name,
                    incarnation=process.incarnation,
                    version=version,
                    digest=f"m{version}" if version is not None else "",
                )
            )

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        if name in self.processes:
            self.dead.append(self.processes.pop(name))
        self.tell(Lost(worker=name))

    def ordered(self, what: str) -> list[Process]:
        """Processes with such an order before them."""
        found = [p for _, p in sorted(self.processes.items())]
        return [p for p in found if (p.staging if what == "stage" else p.commit) is not None]

    @precondition(lambda self: self.ordered("stage"))
    @rule(index=st.integers(0, 2), lie=st.sampled_from(["", "", "", "loaded", "digest", "gap", "nan"]))
    def verifies(self, index: int, lie: str) -> None:
        processes = self.ordered("stage")
        self.verify(processes[index % len(processes)], lie)

    def verify(self, process: Process, lie: str) -> None:
        name = process.name
        if process.staging is None:
            return
        order, process.staging = process.staging, None
        if not lie:
            process.good = order
        version = order.version
        self.ack(process, "staged", order)
        self.ack(
            process,
            "verified",
            order,
            digest="wrong" if lie == "digest" else f"m{version}",
            loaded_digest="wrong" if lie == "loaded" else f"l{version}",
            canary_gap={"gap": 0.6, "nan": float("nan")}.get(lie, 0.5),
        )
        if (
            not lie
            and not self.gathering
            and self.state.scope == "rolling"
            and self.state.awake
            and name in self.state.workers
        ):
            assert process.commit is not None or process.good is None or self.overtaken(order), (
                "rolling waits"
            )

    @precondition(lambda self: len([*self.ordered("stage"), *self.ordered("commit")]) > 1)
    @rule(
        lies=st.tuples(*[st.sampled_from(["", "", "", "gap"])] * 3), loses=st.sampled_from(["", "", *NAMES])
    )
    def all_answer(self, lies: tuple[str, ...], loses: str) -> None:
        """All that have an order answer it, one of them is lost perhaps, and sync hears of it in one go."""
        staging, committing = self.ordered("stage"), self.ordered("commit")
        with self.together():
            for process, lie in zip(staging, lies, strict=False):
                self.verify(process, lie)
            for process in committing:
                self.activate(process, False)
            if loses:
                self.lose(loses)

    def overtaken(self, order: Order) -> bool:
        """Whether the ack came too late: the version had failed, or the order was not the worker's last."""
        return self.ended.get(order.version) == "failed"

    @precondition(lambda self: self.ordered("commit"))
    @rule(index=st.integers(0, 2), fails=st.sampled_from([False, False, False, True]))
    def activates(self, index: int, fails: bool) -> None:
        processes = self.ordered("commit")
        self.activate(processes[index % len(processes)], fails)

    def activate(self, process: Process, fails: bool) -> None:
        if process.commit is None:
            return
        order, process.commit = process.commit, None
        if fails:
            self.ack(process, "failed", order, reason="tensor w")
        else:
            process.active = order.version
            self.ack(process, "active", order)

    @precondition(lambda self: self.ordered("stage"))
    @rule(index=st.integers(0, 2), kind=st.sampled_from(["failed", "refused", "aborted"]))
    def fail(self, index: int, kind: str) -> None:
        processes = self.ordered("stage")
        process = processes[index % len(processes)]
        order, process.staging = process.staging, None
        assert order is not None
        self.ack(process, kind, order, reason="tensor w")

    @precondition(lambda self: self.sent)
    @rule(index=st.integers(0, 12))
    def repeat(self, index: int) -> None:
        """An old answer comes again. `joined` is left out: from a live process it is true each time."""
        ack = self.sent[-1 - index % len(self.sent)]
        if ack.kind != "joined":
            before = self.state
            self.tell(Acked(ack=ack))
            if ack.kind in ("verified", "active", "failed"):
                assert (self.state.workers, self.state.offers) == (before.workers, before.offers)

    # ---- the scheduler and time ----
    @rule(scope=st.sampled_from(["barrier", "rolling"]), awake=AWAKE)
    def want(self, scope: Scope, awake: bool) -> None:
        self.tell(Wanted(scope=scope, awake=awake))

    @rule()
    def nap(self) -> None:
        """Rollout sleeps and wakes: what was staged is staged again, under another order."""
        self.tell(Wanted(scope=self.state.scope, awake=False))
        self.tell(Wanted(scope=self.state.scope, awake=True))

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.at += seconds
        self.tell(Tick())

    # ---- always, and in the end ----
    @invariant()
    def nothing_is_forgotten(self) -> None:
        """A version that has not ended is pending or on offer."""
        for version in self.minted:
            if version not in self.ended:
                assert version in self.state.pending or version in self.state.offers

    def teardown(self) -> None:
        """From any point, honest and prompt workers bring the newest version home, and all others have ended."""
        if not self.minted:
            return
        self.tell(Wanted(scope=self.state.scope, awake=True))
        for version in list(self.state.pending):
            self.publish(version)
        for name in NAMES:
            self.lose(name)
            self.join(name)
        for _ in range(6):
            for process in self.processes.values():
                self.verify(process, "")
                self.activate(process, False)
            self.wait(0.0)
        for version in self.minted:
            assert version in self.ended, f"{version} never ends"
        good = [v for v in self.state.offers.values() if v.ended == "active"]
        if good:
            newest = max(offer.version for offer in good)
            assert {process.active for process in self.processes.values()} == {newest}


Histories.TestCase.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
TestHistories = Histories.TestCase

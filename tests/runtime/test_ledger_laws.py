"""The ledger against a model: conservation, one terminal state, fencing, and exactly the lag decisions of lag.py.

The model keeps what each member should be in plain Python and decides with `contract/lag.py`; the ledger must
answer the same at each step. Every answer is also asked for twice now and then, as after a lost reply.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from records import items, record, scored

from syncline.contract import lag
from syncline.contract.streams import COUNTS, ENTRIES, HELD, TRAJECTORIES, WORK
from syncline.contract.token_path import trajectory_id
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus
from syncline.runtime.ledger import (
    STATES,
    Claim,
    Demand,
    LagBroken,
    Ledger,
    LedgerBroken,
    Policy,
    StampMismatch,
)

SIZE = 2
TRIES = 3
GROUPS = st.integers(0, 19)
INDEX = st.integers(0, SIZE - 1)
DEMANDS: st.SearchStrategy[Demand] = st.sampled_from(["", "signal", "whole"])
WORKERS = st.sampled_from(["w0", "w1"])


@dataclass
class Member:
    state: str = "running"
    attempt: int = 1
    begun: int | None = None
    worker: str = ""
    rewarded: bool = False
    value: float = 0.0
    update: int | None = None

    @property
    def living(self) -> bool:
        return self.state in ("running", "buffered")


@dataclass
class Group:
    members: list[Member] = field(default_factory=lambda: [Member() for _ in range(SIZE)])
    claimed: bool = False
    gone: bool = False
    demand: Demand = ""

    @property
    def useless(self) -> bool:
        """Accounted for, and without what it must offer to be claimed."""
        values = [m.value for m in self.members if m.living]
        short = len(values) < 2 or (self.demand == "whole" and len(values) < SIZE)
        return self.demand != "" and self.ready and (short or min(values) == max(values))

    @property
    def lost_as(self) -> str:
        """How a group ends whose members all have."""
        return max((m.state for m in self.members), key=["filtered", "expired", "failed"].index)

    @property
    def oldest(self) -> int | None:
        begun = [m.begun for m in self.members if m.living and m.begun is not None]
        return min(begun, default=None)

    @property
    def ready(self) -> bool:
        accounted = all(m.rewarded or not m.living for m in self.members)
        return not self.claimed and not self.gone and accounted


class LedgerMachine(RuleBasedStateMachine):
    """Subclassed per policy; `bus` is set by the test that runs it."""

    bus: Bus
    policy: Policy

    @initialize(batch=st.integers(1, 2), max_lag=st.integers(0, 2))
    def start(self, batch: int, max_lag: int) -> None:
        self.job = "j" + secrets.token_hex(5)
        self.batch, self.max_lag = batch, max_lag
        self.ledger = Ledger(
            self.bus, self.job, batch_groups=batch, max_lag=max_lag, policy=self.policy, max_attempts=TRIES
        )
        self.groups: dict[int, Group] = {}
        self.claimed = -1
        self.version = 0  # that the trainer holds; the next update is made at it
        self.claim: Claim | None = None
        self.outcomes: list[tuple[int, str]] = []  # groups as they ended

    # ---- the model ----------------------------------------------------------------------------------------
    def open_oldest(self, without: int | None = None) -> dict[int, int]:
        """Oldest versions of begun groups that are not claimed."""
        return {
            name: group.oldest
            for name, group in self.groups.items()
            if group.oldest is not None and not group.claimed and not group.gone and name != without
        }

    def may_begin(self, name: int, index: int, version: int) -> bool:
        others = [m.begun for i, m in enumerate(self.groups[name].members) if i != index and m.living]
        begun = [v for v in others if v is not None]
        if begun and version >= min(begun):
            return True
        rest = self.open_oldest(without=name).values() if self.policy == "wait" else ()
        return lag.may_start(version, rest, self.claimed, self.batch, self.max_lag)

    def expected_claim(self) -> list[int] | str | None:
        ready = [(name, group.oldest) for name, group in self.groups.items() if group.ready]
        known = [(name, oldest) for name, oldest in ready if oldest is not None]
        if self.policy == "wait":
            first = sorted(known, key=lambda pair: (pair[1], pair[0]))[: self.batch]
            if len(first) == self.batch and first[0][1] + self.max_lag < self.version:
                return "over the bound"
            return lag.claim(known, self.open_oldest(), self.version, self.batch, self.max_lag)
        if self.policy == "expire":
            known = [(name, oldest) for name, oldest in known if oldest + self.max_lag >= self.version]
        if len(known) < self.batch:
            return None
        return [name for name, _ in sorted(known, key=lambda pair: (pair[1], pair[0]))[: self.batch]]

    def account(self, name: int) -> None:
        group = self.groups[name]
        if group.claimed or group.gone:
            return
        if not any(m.living for m in group.members):
            group.gone = True
            self.outcomes.append((name, group.lost_as))
        elif group.useless:
            for member in group.members:
                member.state = "filtered" if member.living else member.state
            group.gone = True
            self.outcomes.append((name, "filtered"))

    def id(self, name: int, index: int) -> str:
        return trajectory_id(self.job, name, index)

    def work_id(self, name: int, index: int) -> str:
        entry = self.ledger.entry(self.id(name, index))
        assert entry is not None
        return entry.work_id or "0-1"

    # ---- the rules ----------------------------------------------------------------------------------------
    @rule(name=GROUPS, demand=DEMANDS)
    def submit(self, name: int, demand: Demand = "") -> None:
        assert self.ledger.submit(items(self.job, name, SIZE), SIZE, demand) == (name not in self.groups)
        self.groups.setdefault(name, Group(demand=demand))

    def pick(self, data: st.DataObject) -> int:
        """A group, more often one that still has something to do."""
        busy = [name for name, group in self.groups.items() if not group.gone and not group.claimed]
        return data.draw(st.sampled_from(busy * 3 + sorted(self.groups)))

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), index=INDEX, worker=WORKERS, behind=st.integers(0, 3), late=st.booleans())
    def begin(self, data: st.DataObject, index: int, worker: str, behind: int, late: bool) -> None:
        self.do_begin(self.pick(data), index, worker, max(0, self.version - behind), late)

    def do_begin(self, name: int, index: int, worker: str, version: int, late: bool = False) -> None:
        member = self.groups[name].members[index]
        attempt = member.attempt - 1 if late else member.attempt
        if late or member.state != "running" or (member.begun is not None and member.worker != worker):
            expected = "fenced"
        elif member.begun == version or self.may_begin(name, index, version):
            expected = "go"
        else:
            expected = "wait"
        for _ in range(2):
            assert self.ledger.begin(self.id(name, index), attempt, worker, VersionId(0, version)) == expected
        if expected == "go":
            member.begun, member.worker = version, worker

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), index=INDEX, late=st.booleans(), wrong=st.integers(0, 5))
    def publish(self, data: st.DataObject, index: int, late: bool, wrong: int) -> None:
        self.do_publish(self.pick(data), index, late, wrong == 0)

    def do_publish(self, name: int, index: int, late: bool = False, wrong: bool = False) -> None:
        member = self.groups[name].members[index]
        stamp = VersionId(0, (member.begun or 0) + int(wrong))
        sent = record(self.id(name, index), member.attempt - (1 if late else 0), stamp)
        work = self.work_id(name, index)
        begun = member.state == "running" and member.begun is not None
        if not late and begun and wrong:
            with pytest.raises(StampMismatch):
                self.ledger.publish(sent, work)
            return
        kept = member.state in ("buffered", "trained")
        answer = "published" if not late and (kept or begun) else "fenced"
        for _ in range(2):
            assert self.ledger.publish(sent, work) == answer
        if answer == "published" and not kept:
            member.state = "buffered"

    @rule(data=st.data(), behind=st.integers(0, 2))
    def advance(self, data: st.DataObject, behind: int) -> None:
        """Bring a group as far as it goes: to `ready`, unless the ledger lets a member wait."""
        name = data.draw(GROUPS)
        if name not in self.groups:
            self.submit(name)
        for index, member in enumerate(self.groups[name].members):
            if member.state == "running" and member.begun is None:
                self.do_begin(name, index, "w0", max(0, self.version - behind))
            if member.state == "running" and member.begun is not None:
                self.do_publish(name, index)
            if member.state == "buffered" and not member.rewarded:
                self.do_reward(name, index)

    @rule(data=st.data())
    def whole_update(self, data: st.DataObject) -> None:
        """What a healthy loop does, so that runs get past the first versions."""
        for _ in range(self.batch):
            self.advance(data, 0)
        if self.claim is None:
            self.make_claim()
        if self.claim is not None:
            self.train(short=False)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), index=INDEX)
    def retry(self, data: st.DataObject, index: int) -> None:
        name = self.pick(data)
        member = self.groups[name].members[index]
        answer = self.ledger.retry(self.id(name, index), self.work_id(name, index), "taken over")
        if member.state != "running":
            assert answer is None
        elif member.attempt == TRIES:
            assert answer is None
            member.state = "failed"
            self.account(name)
        else:
            member.attempt, member.begun, member.worker = member.attempt + 1, None, ""
            assert answer == member.attempt

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), index=INDEX, late=st.booleans(), value=st.sampled_from([0.0, 0.5, 1.0]))
    def reward(self, data: st.DataObject, index: int, late: bool, value: float) -> None:
        self.do_reward(self.pick(data), index, late, value)

    def do_reward(self, name: int, index: int, late: bool = False, value: float | None = None) -> None:
        """`value` None: groups 2, 5, 8 ... get equal ones, the others do not."""
        member = self.groups[name].members[index]
        due = not late and member.state == "buffered" and not member.rewarded
        value = float(name % 3 == index) if value is None else value
        sent = scored(self.id(name, index), member.attempt - (1 if late else 0), value)
        assert self.ledger.reward(sent) == due
        assert not self.ledger.reward(sent)
        if due:
            member.rewarded, member.value = True, value
            self.account(name)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), index=INDEX, state=st.sampled_from(["filtered", "failed", "expired"]))
    def end(self, data: st.DataObject, index: int, state: str) -> None:
        name = self.pick(data)
        member = self.groups[name].members[index]
        ending = next(s for s in ("filtered", "failed", "expired") if s == state)
        assert self.ledger.end(self.id(name, index), ending, "why") == member.living
        if member.living:
            member.state = state
            self.account(name)

    @precondition(lambda self: self.claim is None)
    @rule()
    def make_claim(self) -> None:
        expected = self.expected_claim()
        if expected == "over the bound":
            with pytest.raises(LagBroken, match="began under version"):
                self.ledger.claim(self.version + 1, self.version)
            return
        claim = self.ledger.claim(self.version + 1, self.version)
        assert (None if claim is None else [g.group for g in claim.groups]) == expected
        if claim is None:
            return
        assert self.ledger.claim(self.version + 1, self.version) == claim
        for part in claim.groups:
            group = self.groups[part.group]
            ids = {self.id(part.group, i): m for i, m in enumerate(group.members)}
            assert part.trajectories == tuple(id for id, m in ids.items() if m.living)
            assert part.missing == tuple(id for id, m in ids.items() if not m.living)
            group.claimed = True
        self.claim, self.claimed = claim, self.version

    @precondition(lambda self: self.claim is not None)
    @rule()
    def undo_claim(self) -> None:
        assert self.claim is not None
        assert self.ledger.unclaim(self.claim.update)
        for part in self.claim.groups:
            self.groups[part.group].claimed = False
            self.account(part.group)
        self.claim, self.claimed = None, self.version - 1

    @precondition(lambda self: self.claim is not None)
    @rule(short=st.booleans())
    def train(self, short: bool) -> None:
        claim = self.claim
        assert claim is not None
        living = {
            self.id(part.group, i): member
            for part in claim.groups
            for i, member in enumerate(self.groups[part.group].members)
            if member.living
        }
        if short and living:
            with pytest.raises(LedgerBroken, match="neither trained nor ended"):
                self.ledger.trained(claim.update, list(living)[1:])
        for _ in range(2):
            self.ledger.trained(claim.update, list(living))
        for member in living.values():
            member.state, member.update = "trained", claim.update
        for part in claim.groups:
            some = any(m.state == "trained" for m in self.groups[part.group].members)
            self.outcomes.append((part.group, "trained" if some else "filtered"))
            self.groups[part.group].claimed, self.groups[part.group].gone = False, True
        self.ledger.forget([id for part in claim.groups for id in part.trajectories])
        self.version, self.claim = self.version + 1, None

    @precondition(lambda self: self.policy != "wait")
    @rule()
    def expire_overdue(self) -> None:
        overdue = lag.overdue(self.open_oldest(), self.version, self.max_lag)
        assert self.ledger.overdue(self.version) == overdue
        for name in overdue:
            for index, member in enumerate(self.groups[name].members):
                if member.living:
                    assert self.ledger.end(self.id(name, index), "expired", "over the bound")
                    member.state = "expired"
                    self.account(name)

    @rule()
    def go_back_to_one_hash(self) -> None:
        """As a job's lines lay before there was `held`: the job goes on."""
        if lines := self.bus.hgetall(HELD.at(self.job)):
            self.bus.call("HSET", ENTRIES.at(self.job), *(part for pair in lines.items() for part in pair))
            self.bus.delete(HELD.at(self.job))

    # ---- the laws -----------------------------------------------------------------------------------------
    @invariant()
    def sums_agree(self) -> None:
        if not hasattr(self, "groups"):
            return
        members = [m for group in self.groups.values() for m in group.members]
        wanted: dict[str, int] = {state: sum(m.state == state for m in members) for state in STATES}
        wanted["submitted"] = len(members)
        sums = self.ledger.counts()
        assert {name: sums[name] for name in wanted} == wanted
        assert self.ledger.recount() == wanted
        assert self.ledger.sample(0.0).holds
        assert self.ledger.open_groups() == sum(not g.gone for g in self.groups.values())
        assert self.ledger.ready_groups() == sum(g.ready for g in self.groups.values())
        assert sums["claimed"] == sum(g.claimed for g in self.groups.values())
        told = [outcome for _, outcome in self.ledger.outcomes("0", 1000)]
        assert [(outcome.group, outcome.how) for outcome in told] == self.outcomes

    @invariant()
    def each_line_lies_in_one_place(self) -> None:
        if not hasattr(self, "groups"):
            return
        held, rest = (self.bus.hgetall(key.at(self.job)) for key in (HELD, ENTRIES))
        assert not held.keys() & rest.keys()
        for name in held:
            line = self.ledger.entry(name.decode())
            assert line is not None
            assert line.work_id is not None or line.stream_id is not None
        assert self.ledger.size() == len(held) + len(rest)

    @invariant()
    def streams_agree(self) -> None:
        if not hasattr(self, "groups"):
            return
        members = [m for group in self.groups.values() for m in group.members]
        assert self.bus.length(WORK.at(self.job)) == sum(m.state == "running" for m in members)
        assert self.bus.length(TRAJECTORIES.at(self.job)) == sum(m.state == "buffered" for m in members)

    @invariant()
    def oldest_versions_agree(self) -> None:
        if not hasattr(self, "groups"):
            return
        begun = list(self.open_oldest().values())
        stored = self.bus.hgetall(COUNTS.at(self.job))
        tallies = {int(k.split(b":")[1]): int(v) for k, v in stored.items() if k.startswith(b"oldest:")}
        assert tallies == {version: begun.count(version) for version in set(begun)}
        open_ = {
            name: g.oldest
            for name, g in self.ledger.groups().items()
            if g.phase != "claimed" and g.oldest >= 0
        }
        assert open_ == self.open_oldest()
        if self.policy == "wait":
            assert lag.first_breach(begun, self.claimed, self.batch, self.max_lag) is None


class Waiting(LedgerMachine):
    policy: Policy = "wait"


class Expiring(LedgerMachine):
    policy: Policy = "expire"


class Masking(LedgerMachine):
    policy: Policy = "mask_old_tokens"


@pytest.mark.parametrize("machine", [Waiting, Expiring, Masking])
def test_the_ledger_keeps_its_laws(redis_url: str, machine: type[LedgerMachine]) -> None:
    machine.bus = Bus(redis_url)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )

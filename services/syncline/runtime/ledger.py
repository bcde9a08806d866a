"""The ledger: where each trajectory is, exactly once. Atomic transitions, one conservation law.

A trajectory is running, buffered, trained, filtered, failed or expired; the last four are terminal and it
gets one of them. At any moment submitted = running + buffered + trained + filtered + failed + expired.
Members of a group are claimed together. The lag decisions are those of `contract/lag.py`, made on the server.

Any method may be repeated after a lost reply: the second run changes nothing. The transitions themselves are
in `ledger_lua.py`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from syncline.contract import lag
from syncline.contract.events import WorkItem
from syncline.contract.token_path import Reward, Trajectory, trajectory_id
from syncline.contract.version_path import VersionId
from syncline.runtime import ledger_lua as lua
from syncline.runtime.bus import Bus, Value, pack
from syncline.runtime.ledger_publish import transactions
from syncline.runtime.ledger_shapes import (
    STATES,
    Claim,
    ClaimedGroup,
    ClaimedRecord,
    Decided,
    Demand,
    Ending,
    LagBroken,
    LedgerBroken,
    LedgerEntry,
    OpenGroup,
    Policy,
    StampMismatch,
    State,
    UnknownTrajectory,
    claim_of,
)
from syncline.runtime.ledger_view import LedgerView

if TYPE_CHECKING:
    from syncline.contract.job import JobSpec
    from syncline.runtime.lease import Lease

__all__ = [
    "STATES",
    "Claim",
    "ClaimedGroup",
    "ClaimedRecord",
    "Decided",
    "Demand",
    "Ending",
    "LagBroken",
    "Ledger",
    "LedgerBroken",
    "LedgerEntry",
    "OpenGroup",
    "Policy",
    "StampMismatch",
    "State",
    "UnknownTrajectory",
]


Begun = Literal["go", "wait", "fenced"]
REWARDS_AT_ONCE = 128  # that one transaction takes: others wait for it meanwhile


class Ledger(LedgerView):
    """The ledger of one job. All processes of a job give the same batch, lag and policy.

    batch_groups   groups per update
    max_lag        largest lag, in updates, at which a token may be trained
    policy         what happens when the bound cannot be kept otherwise
    max_attempts   tries at one trajectory before it ends as failed
    lease          of the one process that may claim: checked where the claim is made; None: whoever asks
    """

    def __init__(
        self,
        bus: Bus,
        job: str,
        *,
        batch_groups: int,
        max_lag: int,
        policy: Policy,
        max_attempts: int,
        lease: Lease | None = None,
    ) -> None:
        super().__init__(bus, job)
        self.batch_groups, self.max_lag, self.policy = batch_groups, max_lag, policy
        self.max_attempts, self._lease = max_attempts, lease
        self._keys = [key.at(job) for key in lua.KEYS]

    @classmethod
    def under(
        cls, bus: Bus, job: str, spec: JobSpec, groups: int | None = None, lease: Lease | None = None
    ) -> Self:
        """The ledger of `job` under the law that `spec` states.

        groups   of an evaluation, which is as one batch of one version; None: as many as an update takes
        """
        return cls(
            bus,
            job,
            batch_groups=spec.batch.groups if groups is None else groups,
            max_lag=spec.schedule.max_lag,
            policy=spec.schedule.lag_policy,
            max_attempts=spec.limits.attempts,
            lease=lease,
        )

    # ---- rollout and scheduler ----------------------------------------------------------------------------
    def submit(self, items: Sequence[WorkItem], group_size: int, demand: Demand = "") -> bool:
        """Enter one whole group as running and put its items into `work`. False: the group is known already.

        demand   what it must offer when all members are accounted for: "signal": at least two scored rewards that
                 are not all equal; "whole": that, and every member scored. A group that does not ends as filtered.

        Raises `ValueError` unless `items` are the members 0 .. group_size - 1 of one group of this job.
        """
        group = items[0].group if items else -1
        wanted = [(self.job, trajectory_id(self.job, group, i), group, i) for i in range(group_size)]
        if [(i.job, i.trajectory, i.group, i.index) for i in items] != wanted:
            raise ValueError(f"submit takes the {group_size} members of one group of {self.job}, in order")
        args: list[Value] = [group, group_size, demand]
        for item in items:
            args += [item.trajectory, item.index, item.prompt, pack(item)]
        return bool(self._run(lua.SUBMIT, args))

    def begin(self, trajectory: str, attempt: int, worker: str, version: VersionId) -> Begun:
        """May `worker` begin to sample under `version`? `go` records it; a later retry clears it again.

        `wait`: beginning now could break the lag bound, ask again when time has passed or a version has come.
        `fenced`: this attempt is not the present one, or another worker has begun it; drop it.
        """
        return self.begin_many([(trajectory, attempt)], worker, version)[0]

    def begin_many(self, asked: Sequence[tuple[str, int]], worker: str, version: VersionId) -> list[Begun]:
        """`begin` for several (trajectory, attempt), in order and in one transaction."""
        if not asked:
            return []
        law = (self.job, worker, version.number, version.epoch, *self._law())
        reply = self._run(lua.BEGIN, [*law, *(part for one in asked for part in one)])
        return [cast(Begun, answer.decode()) for answer in reply]

    def publish(self, trajectory: Trajectory, work_id: str) -> Literal["published", "fenced"]:
        """Buffer the record and acknowledge its work item. `fenced`: not the present attempt; drop it.

        Raises `StampMismatch` if the record's oldest span is not of the version it began under.
        """
        return self.publish_many([(trajectory, work_id)])[0]

    def publish_many(self, records: Sequence[tuple[Trajectory, str]]) -> list[Literal["published", "fenced"]]:
        """`publish` for several (record, work item id): few round trips, each of which is one transaction."""
        answers: list[Literal["published", "fenced"]] = []
        refused = ""
        for args in transactions([record for record, _ in records]):
            for reply in self._bus.script_large(lua.PUBLISH, self._keys, args):
                answer = reply.decode()
                if answer not in ("published", "fenced"):
                    record = records[len(answers)][0]
                    refused = refused or (
                        f"trajectory {record.trajectory} attempt {record.attempt}: its oldest span says version "
                        f"{record.oldest}, the ledger let it begin under {answer}"
                    )
                answers.append(answer)
        if refused:
            raise StampMismatch(refused)
        return answers

    def retry(self, trajectory: str, work_id: str, why: str) -> int | None:
        """Give a running trajectory to its next attempt and return that one's number.

        None: nothing is left to do, and the work item is acknowledged: the trajectory was not running any
        more, or its attempts are used up and it ended as failed, with `why`.
        """
        args: list[Value] = [self.job, trajectory, work_id, why, self.max_attempts, secrets.token_hex(6)]
        return int(self._run(lua.RETRY, args)) or None

    def resubmit(self, item: WorkItem) -> int | None:
        """Put a lost work item back; returns the new attempt. None: not running, or its item is there."""
        return int(self._run(lua.RESUBMIT, [self.job, item.trajectory, pack(item)])) or None

    # ---- errands ------------------------------------------------------------------------------------------
    def reward(self, reward: Reward) -> bool:
        """Store a buffered trajectory's reward. False: the attempt is fenced, or it is rewarded already."""
        return self.reward_many([reward])[0]

    def reward_many(self, rewards: Sequence[Reward]) -> list[bool]:
        """`reward` for several, in order and in one round trip, which is some transactions. Raises `ValueError` unless
        a value is finite exactly when its state is `scored`.
        """
        for one in rewards:
            if (one.state == "scored") != (one.value is not None and math.isfinite(one.value)):
                story = f"reward of {one.trajectory} is {one.state} with value {one.value}"
                raise ValueError(f"{story}: a value is finite if scored and None otherwise")
        calls: list[tuple[list[str], list[Value]]] = []
        for at in range(0, len(rewards), REWARDS_AT_ONCE):
            args: list[Value] = [self.job]
            for r in rewards[at : at + REWARDS_AT_ONCE]:
                args += [r.trajectory, r.attempt, r.state, pack(r)]
            calls.append((self._keys, args))
        return [bool(done) for reply in self._bus.script_many(lua.REWARD, calls) for done in reply]

    # ---- trainer ------------------------------------------------------------------------------------------
    def claim(self, update: int, version: int) -> Claim | None:
        """Claim the groups of `update`, which is made at `version`, earliest deadline first. None: wait.

        The same update gets the same claim again. Raises `LagBroken` if policy `wait` would train over the
        bound, `LedgerBroken` if `update` is claimed at another version, and `LeaseLost` with nothing claimed.
        """
        reply = self._leased(lua.CLAIM, [self.job, update, version, *self._law()])
        if reply is None:
            return None
        if len(reply) == 1:
            raise LagBroken(
                f"update {update} at version {version}: {reply[0].decode()}, max_lag is {self.max_lag}"
            )
        claim = claim_of(update, *reply)
        if claim.version != version:
            raise LedgerBroken(f"update {update} is claimed at version {claim.version}, not {version}")
        return claim

    def unclaim(self, update: int) -> bool:
        """Undo a claim: its groups are ready again. False: nothing is claimed for `update`. Raises `LeaseLost`."""
        return bool(self._leased(lua.UNCLAIM, [self.job, update]))

    def trained(self, update: int, trajectories: Sequence[str]) -> None:
        """These claimed trajectories are trained; every other one of the claim must have ended before.

        Raises `LedgerBroken` and changes nothing otherwise. Repeating it for the same update changes nothing.
        """
        story = self._run(lua.TRAINED, [update, *trajectories])
        if story is not None:
            raise LedgerBroken(f"trained({update}): {story.decode()}")

    def end(self, trajectory: str, state: Ending, reason: str) -> bool:
        """End it without training; its work item, record and reward go. False: it has ended already.

        Raises `UnknownTrajectory`.
        """
        if state not in ("filtered", "failed", "expired"):
            raise ValueError(f"end of {trajectory}: state {state!r} is none of filtered, failed, expired")
        if (done := int(self._run(lua.END, [self.job, trajectory, state, reason]))) < 0:
            raise UnknownTrajectory(f"trajectory {trajectory} cannot end as {state}: there is none such")
        return done == 1

    def overdue(self, version: int) -> list[int]:
        """Unclaimed groups whose lag at `version` is over the bound: to be expired, or masked, by policy."""
        begun = {n: g.oldest for n, g in self.groups().items() if g.begun}
        return lag.overdue(begun, version, self.max_lag)

    def forget(self, trajectories: Sequence[str]) -> None:
        """Remove records and rewards of ended trajectories, once a checkpoint holds their effect.

        Their lines stay. Raises `LedgerBroken`, and removes nothing, if one of them has not ended.
        """
        story = self._run(lua.FORGET, list(trajectories))
        if story is not None:
            raise LedgerBroken(f"forget: {story.decode()}")

    def restore(self, update: int, base: int, group: int, size: int, members: Sequence[Decided]) -> int:
        """Write what `update`, made at version number `base`, decided of `group`; how many lines that changed.

        For a Redis that came back older than it was, or empty: what is on disk holds, whatever the lines say. Members
        that are not among `members` had ended before the claim. Raises `LedgerBroken` while the group is claimed.
        """
        why = f"it had ended before update {update} was claimed, and Redis has forgotten how"
        args: list[Value] = [self.job, group, size, update, base, why]
        for one in members:
            begun = (-1, -1) if one.version is None else (one.version.number, one.version.epoch)
            args += [one.index, one.prompt, one.state, one.reason, one.attempt, *begun, one.tokens]
        reply = self._run(lua.RESTORE, args)
        if isinstance(reply, bytes):
            raise LedgerBroken(f"restore({update}): {reply.decode()}")
        return int(reply)

    def _run(self, script: str, args: Sequence[Value]) -> Any:
        return self._bus.script(script)(self._keys, args)

    def _leased(self, script: str, args: Sequence[Value]) -> Any:
        """`_run` of a script that does nothing and answers -1 where the lease is another's."""
        if self._lease is None:
            return self._run(script, [*args, "", ""])
        if (reply := self._run(script, [*args, self._lease.key, self._lease.holder])) == -1:
            raise self._lease.lost()
        return reply

    def _law(self) -> tuple[Value, ...]:
        return (self.batch_groups, self.max_lag, self.policy)

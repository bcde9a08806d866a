"""From a claim to a segment: fetch records and rewards, decide, and say what of it ends.

Records stay in the stream until a checkpoint holds their effect, so they are fetched by the id that the
ledger entry names; whatever a dead trainer had in hand is still there for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract import lag
from syncline.contract.job import JobSpec
from syncline.contract.streams import DEAD, REWARDS, TRAJECTORIES
from syncline.contract.token_path import BadTrajectory, Reward, Trajectory
from syncline.contract.trajectory_wire import decode
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import BadMessage, Bus, Entry, unpack
from syncline.runtime.ledger import Claim, Ledger
from syncline.runtime.messages import id_order
from syncline.runtime.segments import Segment
from syncline.trainer.batch import decide

DEAD_CAP = 10_000


class ClaimForgotten(RuntimeError):
    """Redis came back older than the claim: the ledger no longer knows what it gave out."""


class Intake:
    """The way from the ledger to a segment, for one job."""

    def __init__(self, bus: Bus, ledger: Ledger, spec: JobSpec, spec_hash: str) -> None:
        self._bus, self._ledger, self._spec, self._hash = bus, ledger, spec, spec_hash
        self._job = ledger.job
        self._contract = spec.contract_digest()
        self.cursor = "0"  # newest stream id fetched

    def segment(self, claim: Claim, base: VersionId) -> Segment:
        """What the claim's update will consume. Writes nothing but dead letters. Raises `ClaimForgotten`."""
        records, lost = self._records(claim)
        rewards = self._rewards(claim)
        if lost:
            self._still_claimed(claim)  # else a server that went back is taken for one that lost a record
        return Segment(
            job=self._job,
            update=claim.update,
            base=base,
            contract=self._contract,
            spec_hash=self._hash,
            members=decide(claim, records, rewards, self._spec, self._contract),
            lost=lost,
        )

    def end_unused(self, segment: Segment) -> None:
        """End in the ledger what the segment leaves out. Repeating it changes nothing."""
        for trajectory, why in segment.lost.items():
            self._ledger.end(trajectory, "failed", why)
        for row in segment.filtered:
            self._ledger.end(row.trajectory.trajectory, "filtered", row.why)

    def expire_overdue(self, version: int) -> int:
        """Under lag policy `expire`: end groups that are over the bound at `version`; how many there were."""
        if self._spec.schedule.lag_policy != "expire":
            return 0
        why = f"over the lag bound of {self._spec.schedule.max_lag} at version {version}"
        return self._expire(self._ledger.overdue(version), why)

    def expire_unusable(self, version: int) -> int:
        """Under lag policy `wait`: end groups for which no update from `version` on is left; how many there were.

        There are none unless Redis came back older: workers were then let begin more than is still within the bound,
        and waiting would not end.
        """
        if self._spec.schedule.lag_policy != "wait":
            return 0
        why = (
            f"at version {version}, no update within the lag bound of {self._spec.schedule.max_lag} is left for it, "
            "as when Redis comes back older"
        )
        groups = self._ledger.groups()
        begun = {n: group.oldest for n, group in groups.items() if group.begun}
        ready = {n for n, group in groups.items() if group.phase == "ready"}
        law = self._ledger.batch_groups, self._ledger.max_lag
        return self._expire(lag.unusable(begun, ready, version - 1, *law), why)

    def _expire(self, groups: Sequence[int], why: str) -> int:
        for group in groups:
            for entry in self._ledger.members(group, self._spec.batch.group_size):
                self._ledger.end(entry.trajectory, "expired", why)
        return len(groups)

    def _still_claimed(self, claim: Claim) -> None:
        known = self._ledger.claims().get(claim.update)
        if known is None or known.groups != claim.groups:
            raise ClaimForgotten(f"update {claim.update}: the ledger does not know of its claim any more")

    def _records(self, claim: Claim) -> tuple[dict[str, Trajectory], dict[str, str]]:
        """Records by trajectory, and why one cannot be had."""
        records: dict[str, Trajectory] = {}
        lost: dict[str, str] = {}
        key = TRAJECTORIES.at(self._job)
        found = self._bus.entries_at(key, [held.stream_id for held in claim.records if held.stream_id])
        if found:
            self.cursor = max(self.cursor, next(reversed(found)), key=id_order)
        for trajectory, held in zip(claim.trajectories, claim.records, strict=True):
            raw = found.get(held.stream_id)
            if raw is None:
                record = f"record {held.stream_id}" if held.stream_id else "record"
                lost[trajectory] = f"its {record} is gone from the stream"
                continue
            try:
                records[trajectory] = self._checked(raw, trajectory, held.attempt)
            except BadTrajectory as error:
                lost[trajectory] = str(error)
                self._bury(raw, str(error))
        return records, lost

    def _checked(self, entry: Entry, trajectory: str, attempt: int) -> Trajectory:
        record = decode(entry.fields)
        if (record.trajectory, record.attempt) != (trajectory, attempt):
            raise BadTrajectory(
                f"entry {entry.id} holds {record.trajectory} attempt {record.attempt}, the ledger says "
                f"{trajectory} attempt {attempt}"
            )
        return record

    def _rewards(self, claim: Claim) -> dict[str, Reward]:
        """Rewards by trajectory. One that cannot be read is buried; its trajectory then has none."""
        rewards: dict[str, Reward] = {}
        for trajectory, held in zip(claim.trajectories, claim.records, strict=True):
            if held.reward is None:
                continue
            try:
                rewards[trajectory] = unpack(held.reward, Reward)
            except BadMessage as error:
                self._bury(Entry(trajectory, {b"m": held.reward}, REWARDS.at(self._job)), str(error))
        return rewards

    def _bury(self, entry: Entry, why: str) -> None:
        """Keep an unreadable entry where people can look at it."""
        letter = {
            **entry.fields,
            b"reason": why.encode(),
            b"key": entry.key.encode(),
            b"id": entry.id.encode(),
        }
        self._bus.append(DEAD.at(self._job), letter, cap=DEAD_CAP)

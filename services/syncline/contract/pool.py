"""What is said of the rollout workers of a job whose number changes while it runs; see docs/decisions/0022."""

from __future__ import annotations

from typing import Literal

import msgspec


class ScaleTo(msgspec.Struct, frozen=True, tag="scale_to", forbid_unknown_fields=True, kw_only=True):
    """Another number of rollout workers is wanted of a disjoint job. Stamped by the scheduler, for a user's request, by
    the policy, or because a worker has not come within its time ("late")."""

    workers: int
    why: Literal["request", "policy", "late"]


class Emptied(msgspec.Struct, frozen=True, tag="emptied", forbid_unknown_fields=True, kw_only=True):
    """A rollout worker that leaves holds nothing any more. Stamped by it, or by the scheduler for one overdue."""

    who: str
    seq: int  # the order under which it leaves


class WorkerLeft(msgspec.Struct, frozen=True, tag="worker_left", forbid_unknown_fields=True, kw_only=True):
    """The process of a worker that left has ended: nobody waits for it. Stamped by the scheduler from the launcher."""

    who: str
    seq: int  # the newest order when that was seen


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rollout workers of a job. Stamped by the scheduler into the job's hash."""

    workers: int  # wanted
    least: int
    most: int
    coming: tuple[str, ...] = ()  # wanted, and have not reported for duty yet
    leaving: tuple[str, ...] = ()  # not wanted any more, and not gone yet
    why: str = ""  # what changed the number last; "": it is as it was at the beginning
    fixed: str = ""  # why it cannot change now; "": it can

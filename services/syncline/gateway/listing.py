"""A page of the listing: each job with what can be told of it. One that cannot be read hides no other.

Of such a job the reason says what cannot be read, and its state is the one that its record tells. A record that tells
none is shown as failed, which is what the scheduler makes of a job that it cannot read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from syncline.contract.streams import JOB
from syncline.gateway.records import (
    JobRecord,
    Progress,
    Replies,
    brief,
    found_in,
    progress_of,
    progress_on_disk,
    replies_of,
    spec_of,
    state_of,
    time_of,
)
from syncline.gateway.shapes import JobBrief
from syncline.runtime.bus import BadMessage, Bus
from syncline.runtime.messages import pairs_of
from syncline.runtime.settings import Settings

_Value = TypeVar("_Value")


def listed(bus: Bus, settings: Settings, jobs: list[str]) -> list[JobBrief]:
    """Of each job, in order; one that nothing knows any more is left out. Two round trips, whatever is in them."""
    flats = bus.many([("HGETALL", JOB.at(job)) for job in jobs]) if jobs else []
    found = [_found(settings, job, pairs_of(flat)) for job, flat in zip(jobs, flats, strict=True)]
    recorded = [one.id for one in found if isinstance(one, JobRecord) and one.recorded]
    replies = replies_of(bus, recorded)
    return [
        _brief(one, replies.get(one.id)) if isinstance(one, JobRecord) else one
        for one in found
        if one is not None
    ]


def _found(settings: Settings, job: str, fields: dict[bytes, bytes]) -> JobRecord | JobBrief | None:
    try:
        return found_in(settings, job, fields)
    except BadMessage as error:
        return _unreadable(job, fields, str(error))


def _brief(record: JobRecord, replies: Replies | None) -> JobBrief:
    try:
        return brief(record, progress_on_disk(record) if replies is None else progress_of(record.id, replies))
    except ValueError as error:  # also of a line on disk
        told = f"{record.reason}; its progress cannot be read: {error}".removeprefix("; ")
        return msgspec.structs.replace(brief(record, Progress(phase=None, last=None)), reason=told)


def _unreadable(job: str, fields: dict[bytes, bytes], why: str) -> JobBrief:
    spec = _told(lambda: spec_of(job, fields))
    return JobBrief(
        id=job,
        name=spec.name if spec else "",
        state=_told(lambda: state_of(job, fields)) or "failed",
        reason=f"its record cannot be read: {why}",
        mode=None,
        phase=None,
        update=0,
        updates=spec.schedule.updates if spec else 0,
        reward=None,
        created=_told(lambda: time_of(job, fields, b"created")),
        started=_told(lambda: time_of(job, fields, b"started")),
        ended=_told(lambda: time_of(job, fields, b"ended")),
        kind=spec.kind if spec else "train",
    )


def _told(read: Callable[[], _Value]) -> _Value | None:
    try:
        return read()
    except BadMessage:
        return None

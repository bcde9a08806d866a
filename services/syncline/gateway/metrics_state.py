"""Where one job stands at this moment: `Standing`, read in one round trip."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from syncline.contract.events import TERMINAL_JOB_STATES, WorkerStatus
from syncline.contract.streams import (
    COUNTS,
    DEAD,
    GROUPS,
    JOB,
    JUDGING,
    READY,
    TRAJECTORIES,
    WORK,
    WORKERS,
)
from syncline.gateway.records import JobRecord, from_fields
from syncline.runtime.bus import BadMessage, Bus, unpack
from syncline.runtime.messages import pairs_of
from syncline.runtime.settings import Settings

QUEUES = {"work": WORK, "records": TRAJECTORIES, "judging": JUDGING}


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Of one job. `counts`: the ledger's sums. `queues`: entries or groups that wait, by name."""

    record: JobRecord
    violations: int
    counts: Mapping[str, int]
    queues: Mapping[str, int]
    dead: int
    workers: Mapping[str, WorkerStatus]

    @property
    def over(self) -> bool:
        """The job has ended: no process of it is left."""
        return self.record.state in TERMINAL_JOB_STATES


def standing(bus: Bus, settings: Settings, job: str) -> Standing | None:
    """None: Redis has forgotten the job. Raises `BadMessage` for what cannot be read."""
    fields, counts, workers, dead, groups, ready, *lengths = bus.many(
        [
            ("HGETALL", JOB.at(job)),
            ("HGETALL", COUNTS.at(job)),
            ("HGETALL", WORKERS.at(job)),
            ("XLEN", DEAD.at(job)),
            ("HLEN", GROUPS.at(job)),
            ("ZCARD", READY.at(job)),
            *(("XLEN", key.at(job)) for key in QUEUES.values()),
        ]
    )
    told = pairs_of(fields)
    record = from_fields(settings, job, told)
    if record is None:
        return None
    return Standing(
        record=record,
        violations=_count(JOB.at(job), b"violations", told.get(b"violations", b"0")),
        counts={
            name.decode(): _count(COUNTS.at(job), name, value)
            for name, value in pairs_of(counts).items()
            if b":" not in name
        },
        queues={"open": groups, "ready": ready, **dict(zip(QUEUES, lengths, strict=True))},
        dead=dead,
        workers={name.decode(): unpack(raw, WorkerStatus) for name, raw in pairs_of(workers).items()},
    )


def _count(key: str, field: bytes, raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError:
        raise BadMessage(f"{key} {field!r}: {raw[:40]!r} is no count") from None

"""Routes of a job's progress: metrics, ledger, waits, workers, phases. All live in Redis with the job."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Response

from syncline.contract.events import Heartbeat, LedgerSample, Phase, UpdateMetrics, WorkerStatus
from syncline.contract.streams import DEAD, HEARTBEAT, METRICS, PHASES, SAMPLES, WORKERS, Key
from syncline.gateway import examples
from syncline.gateway.access import Here, Limit, TheJob, is_entry_id, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.errors import Fault, Refusal
from syncline.gateway.gathering import ledger_of
from syncline.gateway.records import JobRecord
from syncline.gateway.shapes import (
    LedgerView,
    MetricsPage,
    PhasePage,
    SamplePage,
    WaitList,
    WorkerList,
)
from syncline.runtime.bus import Bus, unpack

router = APIRouter(prefix="/v1/jobs/{job}", tags=["progress"], dependencies=[Depends(only_known_parameters)])

T = TypeVar("T")
After = Annotated[
    str | None,
    Query(description="`next` of the last page", json_schema_extra={"pattern": "^[0-9]{1,19}-[0-9]{1,19}$"}),
]


@router.get("/metrics", responses=describe(MetricsPage, examples.METRICS))
def metrics(record: TheJob, here: Here, limit: Limit = 500, after: After = None) -> Response:
    """One entry per update. A number that was not finite is null."""
    items, following = _page(here.bus, _recorded(record), METRICS, UpdateMetrics, limit, after)
    return reply(MetricsPage(items=items, next=following))


@router.get("/phases", responses=describe(PhasePage, examples.PHASES))
def phases(record: TheJob, here: Here, limit: Limit = 500, after: After = None) -> Response:
    """Every phase that the scheduler ordered, in order."""
    items, following = _page(here.bus, _recorded(record), PHASES, Phase, limit, after)
    return reply(PhasePage(items=items, next=following))


@router.get("/ledger", responses=describe(LedgerView, examples.LEDGER))
def ledger(record: TheJob, here: Here) -> Response:
    """Trajectories by state, now."""
    job = _recorded(record)
    now = msgspec.structs.asdict(ledger_of(here.bus, record).sample(0.0))
    del now["at"]
    return reply(LedgerView(**now, dead=here.bus.length(DEAD.at(job))))


@router.get("/ledger/samples", responses=describe(SamplePage, examples.SAMPLES))
def ledger_samples(record: TheJob, here: Here, limit: Limit = 500, after: After = None) -> Response:
    """The conservation law as observed each second."""
    items, following = _page(here.bus, _recorded(record), SAMPLES, LedgerSample, limit, after)
    return reply(SamplePage(items=items, next=following))


@router.get("/waits", responses=describe(WaitList, examples.WAITS))
def waits(record: TheJob) -> Response:
    """What waits now, for whom and until when."""
    return reply(WaitList(items=record.waits))


@router.get("/workers", responses=describe(WorkerList, examples.WORKERS))
def workers(record: TheJob, here: Here) -> Response:
    """Rollout workers with their active version, and the job's live processes."""
    job = _recorded(record)
    statuses = here.bus.hgetall(WORKERS.at(job))
    items = [unpack(status, WorkerStatus) for _, status in sorted(statuses.items())]
    names = [f"rollout/w{i}" for i in range(record.spec.rollout.workers)] + ["trainer/trainer", "sync/sync"]
    beats = here.bus.many([("GET", HEARTBEAT.at(f"{job}/{name}")) for name in names])
    return reply(WorkerList(items=items, processes=[unpack(beat, Heartbeat) for beat in beats if beat]))


def _recorded(record: JobRecord) -> str:
    """The job's id. Raises `Refusal` 410 for a job whose streams are gone."""
    if not record.recorded:
        raise Refusal(410, "gone", "this job's streams are gone; its report and summary have their sums")
    return record.id


def _page(
    bus: Bus, job: str, key: Key, type: type[T], limit: int, after: str | None
) -> tuple[list[T], str | None]:
    """Messages after the entry `after`, and the id to go on after, None when these are the newest."""
    if after is not None and not is_entry_id(after):
        fault = Fault(path="after", message="is no entry id", hint="give `next` of a page")
        raise Refusal(422, "parameter-refused", "after: is no entry id", errors=(fault,))
    start = "-" if after is None else f"({after}"
    entries = bus.range(key.at(job), start, "+", limit + 1)
    items = [unpack(entry, type) for entry in entries[:limit]]
    return items, entries[limit - 1].id if len(entries) > limit else None

"""Routes of a job's progress: metrics, ledger, waits, workers, phases. From Redis, or as kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Response

from syncline.contract.diagnosis import Diagnostics
from syncline.contract.drawn import PromptAccount
from syncline.contract.events import Heartbeat, LedgerSample, Phase, UpdateMetrics, WorkerStatus
from syncline.contract.streams import DEAD, DIAGNOSTICS, HEARTBEAT, METRICS, PHASES, SAMPLES, WORKERS
from syncline.gateway import examples
from syncline.gateway.access import Gateway, Here, Limit, TheJob, is_entry_id, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.diagnosed import DiagnosticsPage
from syncline.gateway.errors import Fault, Refusal
from syncline.gateway.evidence import STATES, Evidence
from syncline.gateway.gathering import ledger_of
from syncline.gateway.records import JobRecord
from syncline.gateway.reporter import evidence_of
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
_SUMS = ("submitted", *STATES)
After = Annotated[
    str | None,
    Query(description="`next` of the last page", json_schema_extra={"pattern": "^[0-9]{1,19}-[0-9]{1,19}$"}),
]


@router.get("/metrics", responses=describe(MetricsPage, examples.METRICS))
def metrics(record: TheJob, here: Here, limit: Limit = 500, after: After = None) -> Response:
    """One entry per update. A number that was not finite is null."""
    _check(after)
    if record.recorded:
        items, following = _page(here.bus, METRICS.at(record.id), UpdateMetrics, limit, after)
    else:
        items, following = _kept_page(_evidence(here, record).metrics, limit, after)
    return reply(MetricsPage(items=items, next=following))


@router.get("/diagnostics", responses=describe(DiagnosticsPage, examples.DIAGNOSTICS))
def diagnostics(record: TheJob, here: Here, limit: Limit = 500, after: After = None) -> Response:
    """Mismatch and staleness of each measured update; what was not measured says why."""
    _check(after)
    if record.recorded:
        items, following = _page(here.bus, DIAGNOSTICS.at(record.id), Diagnostics, limit, after)
    else:
        items, following = _kept_page(_evidence(here, record).diagnostics, limit, after)
    return reply(DiagnosticsPage(items=items, next=following))


@router.get("/phases", responses=describe(PhasePage, examples.PHASES))
def phases(record: TheJob, here: Here, limit: Limit = 500, after: After = None) -> Response:
    """Every phase that the scheduler ordered, in order."""
    _check(after)
    if record.recorded:
        items, following = _page(here.bus, PHASES.at(record.id), Phase, limit, after)
    else:
        items, following = _kept_page(_evidence(here, record).phases, limit, after)
    return reply(PhasePage(items=items, next=following))


@router.get("/ledger", responses=describe(LedgerView, examples.LEDGER))
def ledger(record: TheJob, here: Here) -> Response:
    """Trajectories by state: now, or at the end of a job that Redis has forgotten."""
    if record.recorded:
        sample = ledger_of(here.bus, record).sample(0.0)
        sums = {name: count for name, count in msgspec.structs.asdict(sample).items() if name in _SUMS}
        return reply(LedgerView(**sums, holds=sample.holds, dead=here.bus.length(DEAD.at(record.id))))
    counts = _evidence(here, record).counts
    sums = {name: counts.get(name, 0) for name in _SUMS}
    holds = sums["submitted"] == sum(sums[name] for name in STATES)
    return reply(LedgerView(**sums, holds=holds, dead=None))


@router.get("/ledger/samples", responses=describe(SamplePage, examples.SAMPLES))
def ledger_samples(record: TheJob, here: Here, limit: Limit = 500, after: After = None) -> Response:
    """The conservation law as observed each second."""
    _check(after)
    if record.recorded:
        items, following = _page(here.bus, SAMPLES.at(record.id), LedgerSample, limit, after)
    else:
        items, following = _kept_page(_evidence(here, record).samples, limit, after)
    return reply(SamplePage(items=items, next=following))


@router.get("/waits", responses=describe(WaitList, examples.WAITS))
def waits(record: TheJob) -> Response:
    """What waits now, for whom and until when."""
    return reply(WaitList(items=record.waits))


@router.get("/prompts", responses=describe(PromptAccount, examples.PROMPTS))
def prompts(record: TheJob, here: Here) -> Response:
    """What became of the prompts drawn, in groups by data set, and which prompts were given up."""
    return reply(record.prompts if record.recorded else _evidence(here, record).prompts)


@router.get("/workers", responses=describe(WorkerList, examples.WORKERS))
def workers(record: TheJob, here: Here) -> Response:
    """Rollout workers with their active version, and the job's live processes."""
    if not record.recorded:
        raise _gone()
    job = record.id
    statuses = here.bus.hgetall(WORKERS.at(job))
    items = [unpack(status, WorkerStatus) for _, status in sorted(statuses.items())]
    names = [f"rollout/w{i}" for i in range(record.spec.rollout.most)] + ["trainer/trainer", "sync/sync"]
    beats = here.bus.many([("GET", HEARTBEAT.at(f"{job}/{name}")) for name in names])
    return reply(WorkerList(items=items, processes=[unpack(beat, Heartbeat) for beat in beats if beat]))


# ---- pages ------------------------------------------------------------------------------------------------
def _gone() -> Refusal:
    return Refusal(410, "gone", "Redis no longer knows this job and its folder has no record of this")


def _evidence(here: Gateway, record: JobRecord) -> Evidence:
    """What the job's folder kept. Raises `Refusal` 410 if it kept nothing."""
    kept = evidence_of(here.bus, record, whole=False)
    if kept is None:
        raise _gone()
    return kept


def _check(after: str | None) -> None:
    if after is not None and not is_entry_id(after):
        fault = Fault(path="after", message="is no entry id", hint="give `next` of a page")
        raise Refusal(422, "parameter-refused", "after: is no entry id", errors=(fault,))


def _page(bus: Bus, key: str, type: type[T], limit: int, after: str | None) -> tuple[list[T], str | None]:
    """Messages after the entry `after`, and the id to go on after, None when these are the newest."""
    entries = bus.range(key, "-" if after is None else f"({after}", "+", limit + 1)
    items = [unpack(entry, type) for entry in entries[:limit]]
    return items, entries[limit - 1].id if len(entries) > limit else None


def _kept_page(kept: Sequence[T], limit: int, after: str | None) -> tuple[list[T], str | None]:
    """The same of a list: its ids are "0-INDEX"."""
    start = 0 if after is None else int(after.partition("-")[2]) + 1
    items = list(kept[start : start + limit])
    return items, f"0-{start + limit - 1}" if start + limit < len(kept) else None

"""What a job did when: phases, and which version each worker served, over a stretch of its versions.

A stretch is bounded by a number of versions, since in `flow` one phase may last for the whole run. Times are
wall-clock unix seconds. The newest stretch comes with the cursor of the event stream from which on nothing is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Response

from syncline.contract.events import Mode, Phase, PhaseName
from syncline.contract.streams import PHASES
from syncline.contract.version_path import VersionId, VersionRecord
from syncline.gateway.access import Gateway, Here, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.errors import Fault, Refusal
from syncline.gateway.events import newest_cursor
from syncline.gateway.records import JobRecord
from syncline.gateway.reporter import evidence_of
from syncline.gateway.versions import Versions
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.messages import entries_of

router = APIRouter(prefix="/v1/jobs/{job}", tags=["progress"], dependencies=[Depends(only_known_parameters)])

MOST_VERSIONS = 200
MOST_PHASES = 2000  # of one stretch; only a job that changes phase without making updates could have more
_SKEW = 2.0  # seconds by which two machines' clocks may differ


class PhaseStretch(msgspec.Struct, frozen=True, kw_only=True):
    """A phase as ordered. `until`: when the next was; None: it is the newest."""

    seq: int
    mode: Mode
    phase: PhaseName
    update: int
    at: float
    until: float | None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker served. `until`: when a newer version became active on it; None: none has."""

    worker: str
    version: VersionId
    digest: str
    at: float
    until: float | None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Phases and versions of a stretch. `earlier`: give it as `before` for the stretch before this one."""

    start: float | None  # None: nothing has happened
    end: float | None
    phases: list[PhaseStretch]
    versions: list[VersionRecord]  # oldest first
    served: list[Served]  # by worker, then by time; the first may have begun before `start`
    earlier: VersionId | None
    cursor: str | None  # for `Last-Event-ID`; None: an earlier stretch, or Redis no longer knows the job


_AT = 1_788_000_000.0
_EXAMPLE = Timeline(
    start=_AT,
    end=_AT + 3,
    phases=[PhaseStretch(seq=7, mode="colocated", phase="train", update=12, at=_AT, until=None)],
    versions=[
        VersionRecord(
            version=VersionId(0, 12),
            parent=VersionId(0, 11),
            optimizer_step=12,
            contract="c0" * 32,
            state="minted",
            minted=_AT,
        )
    ],
    served=[Served(worker="w0", version=VersionId(0, 11), digest="9f" * 32, at=_AT - 2, until=None)],
    earlier=None,
    cursor="1788000000000-0_1788000000000-1_0-0_0-0",
)


@router.get("/timeline", responses=describe(Timeline, _EXAMPLE))
def timeline(
    record: TheJob,
    here: Here,
    versions: Annotated[int, Query(ge=1, le=MOST_VERSIONS, description="how many versions at most")] = 60,
    before: Annotated[
        str | None,
        Query(
            description="`earlier` of the last answer",
            json_schema_extra={"pattern": r"^[0-9]{1,9}\.[0-9]{1,9}$"},
        ),
    ] = None,
) -> Response:
    """The newest versions, or those before `before`: what led to each, who served it, and the phases meanwhile."""
    cursor = newest_cursor(here.bus, record.id) if record.recorded and before is None else None
    known = Versions(here, record)
    names = known.names
    end = len(names) if before is None else _place(names, before)
    first = max(0, end - versions)
    found, _ = known.records(names[max(0, first - 1) : end + 1])
    around = {name: _in_time(one) for name, one in found.items()}
    chosen = [around[name] for name in names[first:end] if name in around]
    start = chosen[0].minted if chosen and first else None  # None: from the beginning on
    following = around.get(names[end]) if end < len(names) else None
    until = None if following is None else following.minted
    phases = _phases(here, record, start, until)
    served = _served(list(around.values()), until)
    moments = [p.at for p in phases] + [
        t for one in chosen for t in (one.minted, one.active) if t is not None
    ]
    return reply(
        Timeline(
            start=start if start is not None else min(moments, default=None),
            end=until if until is not None else max(moments, default=None),
            phases=phases,
            versions=chosen,
            served=served,
            earlier=names[first] if first else None,
            cursor=cursor,
        )
    )


# ---- versions ---------------------------------------------------------------------------------------------
def _place(names: Sequence[VersionId], before: str) -> int:
    """Raises `Refusal` 422 for text that names none of the versions."""
    place = next((i for i, name in enumerate(names) if str(name) == before), None)
    if place is None:
        fault = Fault(
            path="before", message="names no version of this job", hint="give `earlier` of an answer"
        )
        raise Refusal(422, "parameter-refused", f"before: {fault.message}", errors=(fault,))
    return place


def _in_time(one: VersionRecord) -> VersionRecord:
    """The record without its traces, which are large and not of time."""
    return msgspec.structs.replace(one, rollout_trace=None, convert_trace=None)


def _served(records: Sequence[VersionRecord], end: float | None) -> list[Served]:
    """Who served what before `end`. A version's stretch ends with the next one's, or when its worker left."""
    found = []
    for worker in sorted({worker for one in records for worker in one.workers}):
        became = sorted(
            (path.active, one.version, one.digest, path.left)
            for one in records
            if (path := one.workers.get(worker)) is not None and path.active is not None
        )
        for i, (at, version, digest, left) in enumerate(became):
            if end is not None and at >= end:
                break
            following = became[i + 1][0] if i + 1 < len(became) else None
            ends = [moment for moment in (left, following, end) if moment is not None and moment >= at]
            until = min(ends, default=None)
            found.append(Served(worker=worker, version=version, digest=digest, at=at, until=until))
    return found


# ---- phases -----------------------------------------------------------------------------------------------
def _phases(here: Gateway, record: JobRecord, start: float | None, end: float | None) -> list[PhaseStretch]:
    """Those that overlap `[start, end)`, oldest first, at most the newest `MOST_PHASES`."""
    if record.recorded:
        ordered = _ordered(here.bus, PHASES.at(record.id), start, end)
    else:
        kept = evidence_of(here.bus, record, whole=False)
        ordered = [] if kept is None else list(kept.phases)
    made = [_phase(one, after.at) for one, after in pairwise(ordered)] + [
        _phase(one, None) for one in ordered[-1:]
    ]
    within = [
        one
        for one in made
        if (end is None or one.at < end) and (start is None or one.until is None or one.until > start)
    ]
    return within[-MOST_PHASES:]


def _phase(one: Phase, until: float | None) -> PhaseStretch:
    return PhaseStretch(
        seq=one.seq, mode=one.mode, phase=one.phase, update=one.update, at=one.at, until=until
    )


def _ordered(bus: Bus, key: str, start: float | None, end: float | None) -> list[Phase]:
    """Phases around the stretch; entry ids are the server's milliseconds, near enough to find them by."""
    low = "-" if start is None else f"{_milliseconds(start - _SKEW)}-0"
    high = "+" if end is None else f"{_milliseconds(end + _SKEW)}-0"
    commands: list[tuple[str | int, ...]] = [("XREVRANGE", key, high, low, "COUNT", MOST_PHASES)]
    if start is not None:  # the one that the stretch began in
        commands.append(("XREVRANGE", key, f"({low}", "-", "COUNT", 1))
    if end is not None:  # the one that ended the last
        commands.insert(0, ("XRANGE", key, f"({high}", "+", "COUNT", 1))
    rows = [row for reply in bus.many(commands) for row in reply]  # newest first
    return [unpack(entry, Phase) for entry in entries_of(key, rows[::-1])[0]]


def _milliseconds(at: float) -> int:
    return max(0, int(at * 1000))

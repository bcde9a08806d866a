"""Routes of trajectories and of single tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response

from syncline.contract.token_path import trajectory_id
from syncline.gateway import examples
from syncline.gateway.access import Here, Limit, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.errors import Fault, Refusal
from syncline.gateway.gathering import gather, ledger_of, place_of
from syncline.gateway.lineage import token_path, trajectory_view
from syncline.gateway.records import JobRecord
from syncline.gateway.segment_index import Member, SegmentIndex
from syncline.gateway.shapes import (
    TokenPath,
    TrajectoryBrief,
    TrajectoryPage,
    TrajectoryState,
    TrajectoryView,
)
from syncline.gateway.token_text import token_text
from syncline.gateway.version_lineage import version_spans, version_view
from syncline.gateway.versions import one_known
from syncline.runtime import segments
from syncline.runtime.bus import Bus
from syncline.runtime.ledger import Ledger, LedgerEntry
from syncline.runtime.tracing import spans_of

router = APIRouter(
    prefix="/v1/jobs/{job}/trajectories", tags=["trajectories"], dependencies=[Depends(only_known_parameters)]
)

MOST_EXAMINED = 4096  # ledger lines that one page may look at
_WIDE = 2**31 - 1

Tid = Annotated[
    str,
    Path(
        description="trajectory id",
        examples=["j0123456789-12-3"],
        json_schema_extra={"pattern": r"^j[0-9a-f]{10}-[0-9]{1,15}-[0-9]{1,9}$"},
    ),
]
Number = Annotated[int | None, Query(ge=0, le=_WIDE)]


@router.get("", responses=describe(TrajectoryPage, examples.TRAJECTORY_PAGE))
def list_trajectories(
    record: TheJob,
    here: Here,
    state: TrajectoryState | None = None,
    update: Number = None,
    group: Number = None,
    limit: Limit = 100,
    after: Annotated[str | None, Query(description="`next` of the last page")] = None,
) -> Response:
    """Trajectories by group and index, filtered by state, by the update that consumed them, by group."""
    start = (-1, -1)
    if after is not None:
        place = place_of(record.id, after)
        if place is None:
            fault = Fault(path="after", message="is no trajectory of this job", hint="give `next` of a page")
            raise Refusal(422, "parameter-refused", f"after: {fault.message}", errors=(fault,))
        start = place
    if not record.recorded:
        return reply(_from_disk(record, state, update, group, start, limit))
    if update is not None:
        items = _of_update(here.bus, record, update)
    elif group is not None:
        items = _lines(here.bus, record, [group])
    elif state in ("running", "buffered"):
        open_groups = ledger_of(here.bus, record).groups()  # those of such trajectories, and few
        items = _lines(here.bus, record, [group for group in open_groups if group >= start[0]])
    else:
        return reply(_walk(here.bus, record, state, start, limit))
    wanted = [item for item in items if _wanted(item, state, group) and (item.group, item.index) > start]
    page = wanted[:limit]
    return reply(TrajectoryPage(items=page, next=page[-1].trajectory if len(wanted) > limit else None))


@router.get("/{trajectory}", responses=describe(TrajectoryView, examples.TRAJECTORY))
def get_trajectory(record: TheJob, here: Here, trajectory: Tid) -> Response:
    """The trajectory with its record, scores and hops. 409 while it is being sampled, 410 once it is gone."""
    found = gather(here.bus, record, trajectory)
    return reply(trajectory_view(found, spans_of(here.settings.traces, trajectory=trajectory, job=record.id)))


@router.get("/{trajectory}/tokens/{token}", responses=describe(TokenPath, examples.TOKEN))
def get_token(
    record: TheJob,
    here: Here,
    trajectory: Tid,
    token: Annotated[int, Path(ge=0, le=_WIDE, description="counts sampled tokens from 0")],
) -> Response:
    """One token's whole path: who sampled it under what, who scored it, which update consumed it."""
    found = gather(here.bus, record, trajectory)
    sampled = len(found.record.logprobs)
    if token >= sampled:
        raise Refusal(404, "not-found", f"the trajectory has sampled tokens 0 to {sampled - 1}")
    span = next(span for span in found.record.spans if span.start <= token < span.end)
    known, version = one_known(here, record, span.version), None
    if known is not None:
        version = version_view(known, version_spans(here.settings.traces, record.id, span.version))
    spans = spans_of(here.settings.traces, trajectory=trajectory, job=record.id)
    told = token_text(here.settings.models, record.spec.model.name)
    return reply(token_path(found, token, spans, version, told))


# ---- pages ------------------------------------------------------------------------------------------------
def _wanted(item: TrajectoryBrief, state: TrajectoryState | None, group: int | None) -> bool:
    return (state is None or item.state == state) and (group is None or item.group == group)


def _brief(entry: LedgerEntry, claimed: int | None = None) -> TrajectoryBrief:
    return TrajectoryBrief(
        trajectory=entry.trajectory,
        group=entry.group,
        index=entry.index,
        state=entry.state,
        attempt=entry.attempt,
        update=entry.update if entry.update is not None else claimed,
        reason=entry.reason,
    )


def _lines(bus: Bus, record: JobRecord, groups: list[int]) -> list[TrajectoryBrief]:
    return [_brief(entry) for entry in ledger_of(bus, record).entries(_members(record, groups)).values()]


def _members(record: JobRecord, groups: Iterable[int]) -> list[str]:
    size = record.spec.batch.group_size
    return [trajectory_id(record.id, group, index) for group in groups for index in range(size)]


def _of_state(ledger: Ledger, ids: list[str], state: TrajectoryState | None) -> tuple[int, list[LedgerEntry]]:
    """How many of them there are, and those that are `state`, None: all."""
    if state is not None:
        return ledger.in_state(ids, state)
    found = list(ledger.entries(ids).values())
    return len(found), found


def _of_update(bus: Bus, record: JobRecord, update: int) -> list[TrajectoryBrief]:
    """What the update claimed or consumed, by its segment once there is one."""
    ledger = ledger_of(bus, record)
    path = segments.segment_path(record.folder / "segments", update)
    if path.is_file():
        ids = [name for name, _ in segments.members(path)]
    else:
        claim = ledger.claims().get(update)
        ids = [] if claim is None else list(claim.trajectories)
    found = [_brief(entry, update) for entry in ledger.entries(ids).values()]
    return sorted(found, key=lambda item: (item.group, item.index))


def _walk(
    bus: Bus, record: JobRecord, state: TrajectoryState | None, start: tuple[int, int], limit: int
) -> TrajectoryPage:
    """Through the groups in order. A rare state may need several pages, some of them short."""
    size, ledger = record.spec.batch.group_size, ledger_of(bus, record)
    step = max(1, 1024 // size) if state else limit // size + 2  # a page, and what is left of two groups
    groups = -(-ledger.counts()["submitted"] // size)  # rounded up
    group, items, examined = max(start[0], 0), list[TrajectoryBrief](), 0
    while True:
        ids = _members(record, range(group, group + step))
        there, chunk = _of_state(ledger, ids, state)
        examined += step * size
        items += [i for i in map(_brief, chunk) if (i.group, i.index) > start]
        group += step
        if len(items) > limit:
            return TrajectoryPage(items=items[:limit], next=items[limit - 1].trajectory)
        if group >= groups and not there:
            return TrajectoryPage(items=items, next=None)
        if examined >= MOST_EXAMINED:
            return TrajectoryPage(items=items, next=trajectory_id(record.id, group - 1, size - 1))


def _from_disk(
    record: JobRecord,
    state: TrajectoryState | None,
    update: int | None,
    group: int | None,
    start: tuple[int, int],
    limit: int,
) -> TrajectoryPage:
    """What the segments hold, when Redis no longer has the ledger."""
    if state not in (None, "trained", "filtered"):
        return TrajectoryPage(items=[], next=None)
    use = {"trained": "train", "filtered": "filtered", None: None}[state]
    index = SegmentIndex(record.folder)
    found = index.page(use=use, update=update, group=group, after=start, limit=limit + 1)
    items = [_on_disk(record, member) for member in found[:limit]]
    return TrajectoryPage(items=items, next=items[-1].trajectory if len(found) > limit else None)


def _on_disk(record: JobRecord, member: Member) -> TrajectoryBrief:
    place = place_of(record.id, member.trajectory)
    assert place is not None
    return TrajectoryBrief(
        trajectory=member.trajectory,
        group=place[0],
        index=place[1],
        state="trained" if member.use == "train" else "filtered",
        attempt=None,
        update=member.update,
        reason="",
    )

"""A job's events as they happen (server-sent): machine events, phases, metrics, ledger samples, its state.

consumes      `events`, `phases`, `metrics`, `samples` of the job, and its state
produces      server-sent events; the id of each is a cursor into all four streams, so that a client that
              comes back with `Last-Event-ID` misses nothing and gets nothing twice
waits for     entries in any of the streams, for at most `BLOCK` seconds at a time
unblocked by  an entry, the client leaving, the gateway stopping
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, Header, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from syncline.contract.events import TERMINAL_JOB_STATES, Event, LedgerSample, Phase, UpdateMetrics
from syncline.contract.streams import EVENTS, JOB, METRICS, PHASES, SAMPLES, Key
from syncline.gateway import examples
from syncline.gateway.access import (
    MAX_STREAMS,
    Gateway,
    Here,
    TheJob,
    TheWho,
    is_entry_id,
    only_known_parameters,
)
from syncline.gateway.answers import PROBLEMS, encoded
from syncline.gateway.errors import Refusal
from syncline.gateway.records import JobRecord
from syncline.runtime.bus import BadMessage, Bus, BusDown, Entry, unpack

router = APIRouter(prefix="/v1/jobs/{job}", tags=["progress"], dependencies=[Depends(only_known_parameters)])

STALLED = 20.0  # seconds without room for another event, after which a client is dropped
BLOCK = 1.0  # seconds; also how late a change of state may be told
_SOURCES: tuple[tuple[str, Key, Any], ...] = (
    ("event", EVENTS, Event),
    ("phase", PHASES, Phase),
    ("metrics", METRICS, UpdateMetrics),
    ("ledger", SAMPLES, LedgerSample),
)
_FORGOTTEN = "unrecorded"  # the state of a job that Redis knows no more and that never ended
_COUNT = 100  # entries of one stream in one read
_BEGINNING = "_".join("0-0" for _ in _SOURCES)


_LOG = logging.getLogger(__name__)


class _Dropping(EventSourceResponse):
    """A stream whose client reads nothing for `STALLED` seconds ends: nothing is kept for it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* SendTimeoutError:
            _LOG.warning("an event stream is dropped: its client has read nothing for %g s", STALLED)


_SENT = {
    "type": "object",
    "description": "one event; `data` is JSON",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
    "required": ["id", "event", "data"],
}


@router.get(
    "/events",
    response_class=EventSourceResponse,
    responses={
        200: {
            "description": "event: event | phase | metrics | ledger | state | unreadable | end",
            "content": {"text/event-stream": {"schema": _SENT, "example": examples.EVENT_STREAM}},
        },
        **PROBLEMS,
    },
)
async def events(
    record: TheJob,
    here: Here,
    who: TheWho,
    last_event_id: Annotated[
        str | None, Header(description="id of the last event that the client has")
    ] = None,
) -> Response:
    """All that happens in the job, from its beginning or from `Last-Event-ID` on, until it ends."""
    cursor = last_event_id or _BEGINNING
    places = cursor.split("_")
    if len(places) != len(_SOURCES) or not all(map(is_entry_id, places)):
        raise Refusal(422, "parameter-refused", "Last-Event-ID is no id of this stream")
    most = MAX_STREAMS if who.limits is None else min(MAX_STREAMS, who.limits.streams)
    if here.streaming.total() >= MAX_STREAMS or here.streaming[who.tenant] >= most:
        detail = f"{most} event streams are being served, which is the most"
        raise Refusal(503, "too-many-streams", detail, headers={"Retry-After": "5"})
    stopping = anyio.Event()
    return _Dropping(
        _stream(here, who.tenant, record, cursor, stopping),
        ping=15,
        send_timeout=STALLED,
        shutdown_event=stopping,
        shutdown_grace_period=2 * BLOCK,
    )


def newest_cursor(bus: Bus, job: str) -> str:
    """The `Last-Event-ID` of whoever has seen all that happened until now."""
    commands = [("XREVRANGE", key.at(job), "+", "-", "COUNT", 1) for _, key, _ in _SOURCES]
    return "_".join(rows[0][0].decode() if rows else "0-0" for rows in bus.many(commands))


async def _stream(
    here: Gateway, tenant: str, record: JobRecord, cursor: str, stopping: anyio.Event
) -> AsyncIterator[ServerSentEvent]:
    here.streaming[tenant] += 1
    here.numbers.streams.set(here.streaming.total())
    try:
        told = None
        while not stopping.is_set():
            state = await _in_thread(here, _state, here.bus, record)
            if state != told:
                told = state
                yield _sent("state", {"job": record.id, "state": state}, cursor)
            over = state in TERMINAL_JOB_STATES or state == _FORGOTTEN
            read = await _in_thread(here, _read, here.bus, record.id, cursor, None if over else BLOCK)
            for name, message, cursor in read:
                yield _sent(name, message, cursor)
            if over and not read:
                yield _sent("end", {"job": record.id, "state": state}, cursor)
                return
    except BusDown:
        return  # the client comes back with its cursor; until Redis does, it is told 503
    finally:
        here.streaming[tenant] -= 1
        here.numbers.streams.set(here.streaming.total())


def _state(bus: Bus, record: JobRecord) -> str:
    """The job's state now; of a job that Redis has forgotten, what its folder says."""
    if not record.recorded:
        return record.state
    return (bus.hget(JOB.at(record.id), "state") or _FORGOTTEN.encode()).decode()


def _read(bus: Bus, job: str, cursor: str, block: float | None) -> list[tuple[str, Any, str]]:
    """Name, message and the cursor after it, for what lies beyond `cursor`; entry ids give the order."""
    at = dict(zip((key.at(job) for _, key, _ in _SOURCES), cursor.split("_"), strict=True))
    found = bus.read(at, block, _COUNT)
    full = [entries[-1] for entries in found.values() if len(entries) == _COUNT]
    horizon = min(map(_moment, full), default=None)  # beyond it, one stream's next entries may belong before
    entries = sorted((e for several in found.values() for e in several), key=_moment)
    return list(_told([e for e in entries if horizon is None or _moment(e) <= horizon], at, job))


def _told(entries: list[Entry], at: dict[str, str], job: str) -> Iterator[tuple[str, Any, str]]:
    shapes = {key.at(job): (name, type) for name, key, type in _SOURCES}
    for entry in entries:
        name, type = shapes[entry.key]
        at[entry.key] = entry.id
        cursor = "_".join(at.values())
        try:
            yield name, unpack(entry, type), cursor
        except BadMessage as error:  # told, so that a watcher gets past it
            yield "unreadable", {"stream": name, "entry": entry.id, "detail": str(error)}, cursor


def _moment(entry: Entry) -> tuple[int, int]:
    ms, _, seq = entry.id.partition("-")
    return int(ms), int(seq)


def _sent(name: str, message: Any, cursor: str) -> ServerSentEvent:
    return ServerSentEvent(data=encoded(message).decode(), event=name, id=cursor)


async def _in_thread(here: Gateway, function: Any, *arguments: Any) -> Any:
    """Blocking reads have threads of their own, so that many watchers do not starve the other routes."""
    return await anyio.to_thread.run_sync(
        function, *arguments, limiter=here.stream_threads, abandon_on_cancel=True
    )

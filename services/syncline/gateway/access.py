"""What every route works with: settings, bus, caches; and how a parameter is read strictly."""

from __future__ import annotations

import re
import threading
from typing import Annotated

import anyio
from fastapi import Depends, Path, Query, Request

from syncline.gateway.errors import Fault, Refusal, unknown_job
from syncline.gateway.exporting_processes import Exporting
from syncline.gateway.numbers import Numbers
from syncline.gateway.records import JobRecord, find
from syncline.gateway.tracking import Trackers
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings

MOST_ENTRIES = 500  # of one page
MAX_STREAMS = 64  # event streams served at once; each holds a thread while it waits
JOB_ID = re.compile(r"j[0-9a-f]{10}")


class Gateway:
    """The parts that requests share. Holds nothing that cannot be made again."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self.settings = settings
        self.bus = bus
        self.numbers = Numbers()
        self.streaming = 0  # event streams being served; the event loop alone counts them
        self.stream_threads = anyio.CapacityLimiter(MAX_STREAMS)
        self.index_lock = threading.Lock()  # one refresh of a lineage index at a time
        self.exporting = Exporting(settings)
        self.trackers = Trackers(settings)


def gateway(request: Request) -> Gateway:
    """The application's `Gateway`."""
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found


Here = Annotated[Gateway, Depends(gateway)]


def only_known_parameters(request: Request) -> None:
    """A query parameter that the route does not have, or has twice, is refused and not ignored."""
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            fault = Fault(
                path=name, message="is an unknown parameter", hint=f"known: {', '.join(sorted(known))}"
            )
            raise Refusal(422, "parameter-refused", f"{name}: is an unknown parameter", errors=(fault,))
        if name in seen:
            fault = Fault(path=name, message="is given more than once", hint="keep one")
            raise Refusal(422, "parameter-refused", f"{name}: is given more than once", errors=(fault,))
        seen.add(name)


def is_entry_id(text: str) -> bool:
    """Whether `text` is the id of a stream entry: two unsigned 64-bit numbers."""
    parts = text.split("-")
    return len(parts) == 2 and all(re.fullmatch("[0-9]{1,20}", p) and int(p) < 2**64 for p in parts)


JobId = Annotated[
    str,
    Path(description="job id", examples=["j0123456789"], json_schema_extra={"pattern": "^j[0-9a-f]{10}$"}),
]
Limit = Annotated[int, Query(ge=1, le=MOST_ENTRIES, description="entries per page")]


def job_record(job: JobId, here: Here) -> JobRecord:
    """The job of the path. Raises `Refusal` 404, the same for a strange id as for an unknown one."""
    if not JOB_ID.fullmatch(job):
        raise unknown_job()
    record = find(here.bus, here.settings, job)
    if record is None:
        raise unknown_job()
    return record


TheJob = Annotated[JobRecord, Depends(job_record)]

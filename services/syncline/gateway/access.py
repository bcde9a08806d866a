"""What every route works with: settings, bus, caches; and how a parameter is read strictly."""

from __future__ import annotations

import re
import threading
from collections import Counter
from typing import Annotated

import anyio
import anyio.to_thread
from fastapi import Depends, Path, Query, Request

from syncline.gateway.audit import Audit
from syncline.gateway.door import WHO
from syncline.gateway.errors import Fault, Refusal, unknown_job
from syncline.gateway.exporting_processes import Exporting
from syncline.gateway.forgotten import Forgotten
from syncline.gateway.history import JOB_ID, History, owner_of
from syncline.gateway.large_jobs import LargeJobs
from syncline.gateway.metrics import JobNumbers
from syncline.gateway.numbers import Numbers
from syncline.gateway.records import JobRecord, find
from syncline.gateway.tempo_store import TempoStore
from syncline.gateway.tracking import Trackers
from syncline.gateway.validation_processes import Validating
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings
from syncline.runtime.tokens import SCRAPER, TokenStore, Who

MOST_ENTRIES = 500  # of one page
MAX_STREAMS = 64  # event streams served at once; each holds a thread while it waits
_JOB_IN_TEXT = re.compile(r"(?<![0-9a-z])j[0-9a-f]{10}(?![0-9a-z])")


class Gateway:
    """The parts that requests share. Holds nothing that cannot be made again."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self.settings = settings
        self.bus = bus
        self.numbers = Numbers(JobNumbers(settings, bus))
        self.tokens = TokenStore(settings.token_store)
        self.history = History(bus, settings)
        self.audit = Audit(settings.runs)
        self.streaming: Counter[str] = Counter()  # event streams by tenant; the event loop alone counts them
        self.stream_threads = anyio.CapacityLimiter(MAX_STREAMS)
        self.index_lock = threading.Lock()  # one refresh of a lineage index at a time
        self.exporting = Exporting(settings)
        self.validating = Validating(settings)
        self.trackers = Trackers(settings)
        self.large = LargeJobs(bus)
        self.forgotten = Forgotten()
        self.tempo = TempoStore(settings.traces)


def gateway(request: Request) -> Gateway:
    """The application's `Gateway`."""
    found = request.app.state.gateway
    assert isinstance(found, Gateway)
    return found


Here = Annotated[Gateway, Depends(gateway)]


def who_asks(request: Request) -> Who:
    """Who asks, as the door has found out."""
    found = request.scope[WHO]
    assert isinstance(found, Who)
    return found


TheWho = Annotated[Who, Depends(who_asks)]


def may_see(here: Gateway, who: Who, job: str) -> bool:
    """Whether a well-formed job id is one that `who` may see. An admin may see what is not there, too."""
    return who.admin or owner_of(here.bus, here.settings, job) == who.tenant


def admins_alone(who: TheWho) -> None:
    """For routes that tell of the whole installation. Raises `Refusal` 403."""
    if not who.admin:
        raise Refusal(403, "forbidden", "this is for the installation's operators")


def scrapers_alone(who: TheWho) -> None:
    """For `/metrics`: an admin, or who has the token that reads nothing else. Raises `Refusal` 403."""
    if who != SCRAPER:
        admins_alone(who)


async def own_jobs_alone(request: Request) -> None:
    """Of the whole application: a job id in any path or query parameter must be one that the asker may see.

    Raises `Refusal` 404, the same as for a job that is not there, after the same look-ups.
    """
    given = [str(value) for value in request.path_params.values()]
    given += [value for _, value in request.query_params.multi_items()]
    jobs = {found for text in given for found in _JOB_IN_TEXT.findall(text)}
    here, who = gateway(request), who_asks(request)
    if not jobs or (who.admin and not here.tokens.exists()):
        return
    for job in jobs:
        owner = await anyio.to_thread.run_sync(owner_of, here.bus, here.settings, job)
        if who.admin:
            request.scope["syncline.foreign"] = owner not in (None, who.tenant)
        elif owner != who.tenant:
            raise unknown_job()


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


async def _body(request: Request) -> bytes:
    return await request.body()


Body = Annotated[bytes, Depends(_body)]
JobId = Annotated[
    str,
    Path(description="job id", examples=["j0123456789"], json_schema_extra={"pattern": "^j[0-9a-f]{10}$"}),
]
Limit = Annotated[int, Query(ge=1, le=MOST_ENTRIES, description="entries per page")]


def job_record(job: JobId, here: Here, _: Annotated[None, Depends(own_jobs_alone)]) -> JobRecord:
    """The job of the path. Raises `Refusal` 404: the same for a strange id, an unknown one and another tenant's."""
    if not JOB_ID.fullmatch(job):
        raise unknown_job()
    record = find(here.bus, here.settings, job)
    if record is None:
        raise unknown_job()
    return record


TheJob = Annotated[JobRecord, Depends(job_record)]

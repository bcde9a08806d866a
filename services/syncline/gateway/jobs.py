"""Routes of jobs: submit, list, look at."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from syncline.gateway import addresses, examples, held_out, precision_plan
from syncline.gateway.access import Body, Gateway, Here, Limit, TheJob, TheWho, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.errors import Fault, Refusal
from syncline.gateway.listing import listed
from syncline.gateway.records import (
    JobRecord,
    Progress,
    find,
    progress_of,
    progress_on_disk,
    replies_of,
    view,
)
from syncline.gateway.shapes import JobPage, JobView
from syncline.gateway.submission import read_spec, submit
from syncline.runtime.bus import Bus

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], dependencies=[Depends(only_known_parameters)])


_SPEC_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/JobSpec"},
                "example": examples.SPEC,
            },
            "application/toml": {"schema": {"type": "string"}, "example": examples.SPEC_TOML},
        },
    }
}


@router.post(
    "",
    status_code=201,
    openapi_extra=_SPEC_BODY,
    responses={**describe(JobView, examples.JOB), **describe(JobView, examples.JOB, 201)},
)
def submit_job(
    body: Body,
    here: Here,
    who: TheWho,
    request: Request,
    idempotency_key: Annotated[str | None, Header(description="the same key and spec: the same job")] = None,
) -> Response:
    """Submit a job spec as JSON or TOML. 201: a new job. 200: the key stands for this job already."""
    spec = read_spec(body, request.headers.get("content-type", ""), here.settings)
    addresses.check(who, spec)
    held_out.check(here, who, spec)
    made = submit(here, who, spec, idempotency_key)
    held_out.pin(here.bus, spec, made.job)
    record = find(here.bus, here.settings, made.job)
    if record is None:
        raise Refusal(409, "idempotency-key-taken", f"this key stands for job {made.job}, which is gone")
    headers = {"Location": f"/v1/jobs/{made.job}"}
    return reply(_view(here, record), 201 if made.new else 200, headers)


@router.get("", responses=describe(JobPage, examples.JOB_PAGE))
def list_jobs(
    here: Here,
    who: TheWho,
    limit: Limit = 50,
    after: Annotated[str | None, Query(description="`next` of the last page")] = None,
) -> Response:
    """Jobs, newest first; those too that only their folder still knows, and those whose record cannot be read."""
    known, places = here.history.visible(who)
    start = 0
    if after is not None:
        start = places.get(after, -1) + 1
        if start == 0:
            fault = Fault(path="after", message="names no job of this listing", hint="give `next` of a page")
            raise Refusal(422, "parameter-refused", f"after: {fault.message}", errors=(fault,))
    page = [job for job, _ in known[start : start + limit]]
    items = listed(here.bus, here.settings, page)
    return reply(JobPage(items=items, next=page[-1] if start + limit < len(known) else None))


@router.get("/{job}", responses=describe(JobView, examples.JOB))
def get_job(record: TheJob, here: Here) -> Response:
    """The job with its resolved spec and what it waits for."""
    return reply(_view(here, record))


def _view(here: Gateway, record: JobRecord) -> JobView:
    told = precision_plan.brief(here.settings.models, record)
    return msgspec.structs.replace(view(record, _progress(here.bus, record)), precision=told)


def _progress(bus: Bus, record: JobRecord) -> Progress:
    if not record.recorded:
        return progress_on_disk(record)
    return progress_of(record.id, replies_of(bus, [record.id])[record.id])

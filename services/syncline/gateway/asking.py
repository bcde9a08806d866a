"""Routes that ask something of a job that runs: cancel, pause, resume, another mode, another number of workers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Response

from syncline.contract.events import Mode
from syncline.gateway import examples
from syncline.gateway.access import Body, Here, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply, takes
from syncline.gateway.errors import Fault, Refusal, Shape, body_as
from syncline.gateway.records import JobRecord
from syncline.gateway.shapes import Accepted
from syncline.gateway.submission import ask, ended

router = APIRouter(prefix="/v1/jobs/{job}", tags=["jobs"], dependencies=[Depends(only_known_parameters)])

Verb = Literal["cancel", "pause", "resume", "switch", "scale"]


class SwitchBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which mode is wanted."""

    mode: Mode


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True):
    """How many rollout workers are wanted."""

    workers: Annotated[int, msgspec.Meta(ge=1)]


@router.post("/cancel", status_code=202, responses=describe(Accepted, examples.accepted("cancel"), 202))
def cancel_job(record: TheJob, here: Here, body: Body) -> Response:
    """End the job now. 409 with its state if it has ended."""
    return _bare(here, record, body, "cancel")


@router.post("/pause", status_code=202, responses=describe(Accepted, examples.accepted("pause"), 202))
def pause_job(record: TheJob, here: Here, body: Body) -> Response:
    """Stop after what is in flight. A paused job stays paused."""
    return _bare(here, record, body, "pause")


@router.post("/resume", status_code=202, responses=describe(Accepted, examples.accepted("resume"), 202))
def resume_job(record: TheJob, here: Here, body: Body) -> Response:
    """Go on. A running job runs on."""
    return _bare(here, record, body, "resume")


@router.post(
    "/mode",
    status_code=202,
    openapi_extra=takes(SwitchBody, {"mode": "disjoint"}),
    responses=describe(Accepted, examples.accepted("switch"), 202),
)
def switch_job(record: TheJob, here: Here, body: Body) -> Response:
    """Switch to another mode at run time. A job already in that mode stays in it."""
    wanted = _wanted(record, body, SwitchBody, "mode").mode
    if wanted == "disjoint" and record.spec.schedule.max_lag < 1:
        message, hint = "0 leaves disjoint pools nothing to overlap", "submit the job with at least 1"
        raise _refused("mode-refused", "schedule.max_lag", message, hint)
    return _asked(here, record, "switch", mode=wanted)


@router.post(
    "/workers",
    status_code=202,
    openapi_extra=takes(ScaleBody, {"workers": 4}),
    responses=describe(Accepted, examples.accepted("scale"), 202),
)
def scale_job(record: TheJob, here: Here, body: Body) -> Response:
    """Ask for so many rollout workers, within the spec's bounds. Those that leave end what they hold first."""
    wanted = _wanted(record, body, ScaleBody, "workers").workers
    rollout = record.spec.rollout
    if not rollout.least <= wanted <= rollout.most:
        message = f"{wanted} is not between {rollout.least} (least) and {rollout.most} (most)"
        hint = "submit the job with rollout.workers_least and rollout.workers_most"
        raise _refused("workers-refused", "workers", message, hint)
    fixed = _fixed(record)
    if fixed:
        raise Refusal(409, "pool-fixed", f"the number of workers cannot change: {fixed}")
    return _asked(here, record, "scale", workers=wanted)


def _bare(here: Here, record: JobRecord, body: bytes, verb: Literal["cancel", "pause", "resume"]) -> Response:
    if body not in (b"", b"{}"):
        raise Refusal(422, "body-refused", f"{verb} takes no body")
    _must_be_recorded(record)
    return _asked(here, record, verb)


def _wanted(record: JobRecord, body: bytes, shape: type[Shape], path: str) -> Shape:
    """What the body asks of a job that is not over. Raises `Refusal`: 422 for another shape, 409."""
    wanted = body_as(body, shape, path)
    _must_be_recorded(record)
    return wanted


def _must_be_recorded(record: JobRecord) -> None:
    if not record.recorded:
        raise ended(record.state)


def _asked(
    here: Here, record: JobRecord, verb: Verb, mode: Mode | None = None, workers: int | None = None
) -> Response:
    state = ask(here.bus, record.id, verb, mode, workers)
    return reply(Accepted(job=record.id, verb=verb, state=state), 202)  # type: ignore[arg-type]


def _refused(kind: str, path: str, message: str, hint: str) -> Refusal:
    """422 for what the job can never have."""
    fault = Fault(path=path, message=message, hint=hint)
    return Refusal(422, kind, f"{path}: {message}", errors=(fault,))


def _fixed(record: JobRecord) -> str:
    """Why the job cannot have another number of workers now; "": it can."""
    if record.pool is not None:
        return record.pool.fixed
    if record.spec.rollout.scales and record.spec.schedule.mode != "disjoint":
        return "the job begins colocated: its workers share the trainer's devices"
    return ""

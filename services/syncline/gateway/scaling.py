"""The route that asks for another number of rollout workers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Response

from syncline.gateway import examples
from syncline.gateway.access import Here, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.errors import Fault, Refusal, body_as
from syncline.gateway.jobs import Body
from syncline.gateway.records import JobRecord
from syncline.gateway.shapes import Accepted
from syncline.gateway.submission import ask, ended

router = APIRouter(prefix="/v1/jobs/{job}", tags=["jobs"], dependencies=[Depends(only_known_parameters)])

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"workers": {"type": "integer", "minimum": 1}},
                    "required": ["workers"],
                    "additionalProperties": False,
                },
                "example": {"workers": 4},
            }
        },
    }
}


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True):
    """How many rollout workers are wanted."""

    workers: Annotated[int, msgspec.Meta(ge=1)]


@router.post(
    "/workers",
    status_code=202,
    openapi_extra=_BODY,
    responses=describe(Accepted, examples.accepted("scale"), 202),
)
def scale_job(record: TheJob, here: Here, body: Body) -> Response:
    """Ask for so many rollout workers, within the spec's bounds. Those that leave end what they hold first."""
    wanted = body_as(body, ScaleBody, "workers").workers
    if not record.recorded:
        raise ended(record.state)
    _refuse(record, wanted)
    state = ask(here.bus, record.id, "scale", workers=wanted)
    return reply(Accepted(job=record.id, verb="scale", state=state), 202)  # type: ignore[arg-type]


def _refuse(record: JobRecord, wanted: int) -> None:
    """Raise `Refusal` for a number that the job cannot have: for good (422), or now (409)."""
    rollout = record.spec.rollout
    if not rollout.least <= wanted <= rollout.most:
        message = f"{wanted} is not between {rollout.least} (least) and {rollout.most} (most)"
        hint = "submit the job with rollout.workers_least and rollout.workers_most"
        fault = Fault(path="workers", message=message, hint=hint)
        raise Refusal(422, "workers-refused", f"workers: {message}", errors=(fault,))
    fixed = "" if record.pool is None else record.pool.fixed
    if record.pool is None and rollout.scales and record.spec.schedule.mode != "disjoint":
        fixed = "the job begins colocated: its workers share the trainer's devices"
    if fixed:
        raise Refusal(409, "pool-fixed", f"the number of workers cannot change: {fixed}")

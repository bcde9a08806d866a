"""Routes of validations: climb the ladder for a job, see how far it is, read what was found, stop it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Response

from syncline.contract.validation import (
    LEVELS,
    VALIDATION_PATH,
    Check,
    Diagnosis,
    Level,
    Result,
    Validation,
)
from syncline.gateway.access import Body, Gateway, Here, TheJob, only_known_parameters
from syncline.gateway.answers import PROBLEMS, describe, reply
from syncline.gateway.errors import Fault, Refusal, body_as
from syncline.gateway.records import JobRecord
from syncline.gateway.shapes import HopView
from syncline.gateway.validation_processes import Busy, Full
from syncline.gateway.version_lineage import hop_view
from syncline.gateway.versions import Versions
from syncline.runtime.tracing import spans_of

router = APIRouter(
    prefix="/v1/jobs/{job}/validation", tags=["validation"], dependencies=[Depends(only_known_parameters)]
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


class ValidationBody(msgspec.Struct, forbid_unknown_fields=True):
    """What is wanted. `levels`: None: the spec's `validation.levels`."""

    levels: tuple[Level, ...] | None = None


class ValidationList(msgspec.Struct, frozen=True, kw_only=True):
    """Validations of a job in the order in which they were begun; those of its versions have a version."""

    items: list[Validation]


class ValidationView(msgspec.Struct, frozen=True, kw_only=True):
    """A validation, and its spans: of the climb, and of each level that ended. They come when the climb is over."""

    validation: Validation
    path: list[HopView]


_CHECK = Check(
    name="codes and scales",
    found=24,
    bound=0,
    source="the format's definition in numpy, byte for byte",
    unit="differ",
    where="model.layers.0.mlp.experts.3.down_proj.weight_packed: first at byte 0",
)
_FOUND = Validation(
    job="j0123456789",
    number=1,
    why="asked",
    state="fails",
    levels=(1, 2, 3, 4, 5),
    began=1_788_000_000.0,
    failed_at=2,
    boundary="level 2 (quantizer and converter)",
    results=(
        Result(level=1, checks=(), seconds=0.1, evidence="evidence/level-1.json"),
        Result(level=2, checks=(_CHECK,), seconds=0.9, evidence="evidence/level-2.json"),
    ),
    diagnosis=Diagnosis(
        symptom="stored codes or scales are not those of the format",
        cause="scale group, rounding rule, nibble order, padding, or two experts that changed places",
        check_next="the first byte that differs: inside a block rounding, at its edge grouping",
    ),
    recipe="int4_qat_w4a16",
    model="tiny-moe",
    contract="9f" * 32,
    evidence="j0123456789/validations/1",
)
_BEGUN = Validation(
    job="j0123456789",
    number=1,
    why="asked",
    state="running",
    levels=(1, 2, 3, 4, 5),
    began=1_788_000_000.0,
    evidence="j0123456789/validations/1",
)
_HOP = HopView(
    hop="validation.level",
    source="span",
    at=1_788_000_001.0,
    seconds=0.9,
    service="validation",
    instance="1",
    attributes={"number": 1, "level": 2, "verdict": "fails", "checks": 1, "worst": "codes and scales"},
)
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "levels": {
            "type": ["array", "null"],
            "items": {"type": "integer", "minimum": 1, "maximum": 9},
            "minItems": 1,
            "uniqueItems": True,
        }
    },
    "additionalProperties": False,
}
_BODY = {
    "requestBody": {
        "required": False,
        "content": {"application/json": {"schema": _SCHEMA, "example": {"levels": [1, 2, 3, 4, 5]}}},
    }
}
Number = Annotated[
    str,
    Path(
        description="counts a job's validations from 1",
        examples=["1"],
        json_schema_extra={"pattern": "^[1-9][0-9]{0,8}$"},
    ),
]


@router.post("", status_code=202, openapi_extra=_BODY, responses=describe(Validation, _BEGUN, 202))
def begin_validation(record: TheJob, here: Here, body: Body) -> Response:
    """Climb the validation ladder with the job's recipe and model, in a process of its own. 409 while one runs."""
    levels = _levels(record, body)
    if record.spec.kind != "train":
        raise Refusal(422, "cannot-validate", "an evaluation has no trainer that rollout could part from")
    if why := here.validating.unavailable():
        raise Refusal(503, "cannot-validate", why)
    try:
        view = here.validating.begin(record, levels, _links(here, record))
    except Busy as busy:
        raise Refusal(409, "validation-running", str(busy), state=busy.view.state) from None
    except Full as full:
        raise Refusal(429, "too-many-validations", str(full), headers={"Retry-After": "10"}) from None
    return reply(view, 202, {"Location": f"/v1/jobs/{record.id}/validation/{view.number}"})


def _levels(record: JobRecord, body: bytes) -> tuple[Level, ...]:
    wanted = body_as(body, ValidationBody) if body else ValidationBody()
    levels = record.spec.validation.levels if wanted.levels is None else wanted.levels
    if not levels or len(set(levels)) != len(levels):
        message = "names no level" if not levels else "names a level more than once"
        fault = Fault(path="levels", message=message, hint=f"any of {', '.join(map(str, LEVELS))}, each once")
        raise Refusal(422, "body-refused", f"levels: {message}", errors=(fault,))
    return tuple(sorted(levels))


def _links(here: Gateway, record: JobRecord) -> tuple[str, ...]:
    """The trace of the job's newest version, if there is one."""
    known = Versions(here, record)
    newest = known.records(known.names[-1:])[0].values()
    return tuple(version.traceparent for version in newest if version.traceparent)


@router.get("", responses=describe(ValidationList, ValidationList(items=[_FOUND])))
def list_validations(record: TheJob, here: Here) -> Response:
    """Every validation of the job: asked for, as its gate before the start, and of its versions."""
    return reply(ValidationList(items=here.validating.all(record)))


@router.get("/{number}", responses=describe(ValidationView, ValidationView(validation=_FOUND, path=[_HOP])))
def get_validation(record: TheJob, here: Here, number: Number) -> Response:
    """How far one is: the level that is climbed now, what each level that ended has found, and the diagnosis."""
    view = _known(here, record, number)
    names = tuple(hop.name for hop in VALIDATION_PATH)
    spans = spans_of(here.settings.traces, job=record.id, names=names)
    path = [hop_view(span) for span in spans if span.attributes.get("number") == view.number]
    return reply(ValidationView(validation=view, path=path))


@router.post("/{number}/cancel", status_code=202, responses=describe(Validation, _BEGUN, 202))
def cancel_validation(record: TheJob, here: Here, number: Number, body: Body) -> Response:
    """Stop one that runs. 409 with its state if it has ended. A gate that is stopped does not open: its job fails."""
    if body not in (b"", b"{}"):
        raise Refusal(422, "body-refused", "cancel takes no body")
    view = _known(here, record, number)
    stopped = here.validating.cancel(record, view.number)
    if stopped is None:
        raise Refusal(409, "validation-ended", f"the validation is over: {view.state}", state=view.state)
    return reply(stopped, 202)


@router.get(
    "/{number}/report",
    response_class=Response,
    responses={
        200: {
            "description": "the report",
            "content": {"text/html": {"schema": {"type": "string"}, "example": "<!doctype html>..."}},
        },
        **PROBLEMS,
    },
)
def validation_report(record: TheJob, here: Here, number: Number) -> Response:
    """The whole climb as one HTML page that asks the network for nothing. 404 until the climb is over."""
    view = _known(here, record, number)
    page = here.validating.page(record, view.number)
    if page is None:
        raise Refusal(404, "not-found", "there is no report of this validation", state=view.state)
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
    return Response(page, media_type="text/html", headers=headers)


def _known(here: Gateway, record: JobRecord, number: str) -> Validation:
    right = number.isascii() and number.isdecimal() and len(number) <= 9 and not number.startswith("0")
    view = here.validating.look(record, int(number)) if right else None
    if view is None:
        raise Refusal(404, "not-found", "there is no such validation of this job")
    return view

"""Routes of evaluations: ask for one of a version, and see what came of those that ended."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Response
from pydantic import ValidationError

from syncline.contract import evaluation_rules as rules
from syncline.contract.evaluation import Evaluation
from syncline.contract.evaluation_spec import HELD_OUT, EvaluationSpec
from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems
from syncline.contract.spec_problems import explain
from syncline.contract.spec_text import SpecError
from syncline.contract.version_path import VersionId
from syncline.gateway import addresses
from syncline.gateway.access import Body, Here, TheJob, TheWho, only_known_parameters
from syncline.gateway.answers import describe, reply, takes
from syncline.gateway.errors import Refusal, body_as
from syncline.gateway.held_out import LATEST, check, pin, version_of
from syncline.gateway.records import JobRecord
from syncline.gateway.submission import judged, submit
from syncline.runtime.evaluations import kept

router = APIRouter(prefix="/v1/jobs", tags=["evaluations"], dependencies=[Depends(only_known_parameters)])


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of a version. `version`: EPOCH.NUMBER, NUMBER of its newest epoch, or "latest" in the store.

    `options` of the task and data `seed`, where they are not the training job's, name held-out data; without either the
    prompts are of the reserved range of indices. `first`: null: where that begins.
    """

    version: str = LATEST
    prompts: int = 64
    samples: int = 4
    k: tuple[int, ...] = (1,)
    first: int | None = None
    correct: float = 1.0
    seed: int | None = None
    options: dict[str, Any] = {}


class EvaluationList(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluations of a job's versions, in the order in which they ended."""

    items: list[Evaluation]


class Evaluating(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation is queued as a job of its own."""

    id: str
    of: str
    version: VersionId


_EXAMPLE = Evaluation(
    job="j9876543210",
    of="j0123456789",
    shared=False,
    version=12,
    epoch=0,
    digest="5f" * 32,
    contract="c0" * 32,
    model="tiny-dense",
    prompts=64,
    samples=4,
    first=HELD_OUT,
    seed=0,
    counted=254,
    correct=127,
    threshold=1.0,
    mean_reward=0.71,
    reward_interval=(0.66, 0.76),
    pass_at={"1": (0.5, 0.42, 0.58), "4": (0.81, 0.7, 0.89)},
    pass_prompts={"1": 64, "4": 62},
    unscored=2,
    lost=0,
    foreign=0,
    sampling={"temperature": 1.0},
    when=1.79e9,
)

_EXAMPLE_ASKED = {"version": "12", "prompts": 64, "samples": 4, "k": [1, 4]}


@router.get("/{job}/evaluations", responses=describe(EvaluationList, EvaluationList(items=[_EXAMPLE])))
def evaluations(record: TheJob) -> Response:
    """What came of the evaluations of this job's versions; of an evaluation, its own."""
    try:
        return reply(EvaluationList(items=kept(record.folder)))
    except ValueError as error:
        raise Refusal(500, "record-unreadable", str(error)) from None


@router.post(
    "/{job}/evaluations",
    status_code=201,
    openapi_extra=takes(Asked, _EXAMPLE_ASKED),
    responses=describe(
        Evaluating, Evaluating(id="j9876543210", of="j0123456789", version=VersionId(0, 12)), 201
    ),
)
def evaluate(record: TheJob, here: Here, who: TheWho, body: Body) -> Response:
    """Queue an evaluation of a version. 409 if the job no longer has it."""
    asked = body_as(body, Asked)
    spec = spec_of(record, asked)
    addresses.check(who, spec)
    check(here, who, spec)
    made = submit(here, who, judged(spec, here.settings), None)
    pin(here.bus, spec, made.job)
    place = {"Location": f"/v1/jobs/{made.job}"}
    return reply(Evaluating(id=made.job, of=record.id, version=version_of(record, asked.version)), 201, place)


def spec_of(record: JobRecord, asked: Asked) -> JobSpec:
    """The evaluation's spec. Raises `SpecError`, or `Refusal` for a version that is not there."""
    own = asked.options or asked.seed is not None
    first = asked.first if asked.first is not None else (0 if own else HELD_OUT)
    given = {
        "job": record.id,
        "version": str(version_of(record, asked.version)),
        "first": first,
        **{name: getattr(asked, name) for name in ("prompts", "samples", "k", "correct")},
    }
    try:
        part = EvaluationSpec.model_validate(given)
        spec = rules.of(record.spec, part, asked.options, asked.seed)
    except ValidationError as error:
        raise SpecError(explain(error.errors(), given)) from None
    found = problems(spec)
    if found:
        raise SpecError(found)
    return spec

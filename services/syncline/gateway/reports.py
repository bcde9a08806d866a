"""Routes of a job's summary and report: made from Redis while the job is there, from its folder afterwards."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Depends, Response

from syncline.gateway import examples
from syncline.gateway.access import Here, TheJob, only_known_parameters
from syncline.gateway.answers import PROBLEMS, describe, encoded
from syncline.gateway.diagnosed import DiagnosticsSummary, TermSummary
from syncline.gateway.errors import Refusal
from syncline.gateway.evidence import Evidence
from syncline.gateway.report import render
from syncline.gateway.reporter import evidence_of
from syncline.gateway.summary import (
    LagPolicySummary,
    LagSummary,
    LedgerSummary,
    LengthSummary,
    ModeBegan,
    RewardSummary,
    SecondsSummary,
    Summary,
    VersionSummary,
    summarise,
)
from syncline.runtime.segments import BadSegment

router = APIRouter(prefix="/v1/jobs/{job}", tags=["reports"], dependencies=[Depends(only_known_parameters)])

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"

_EXAMPLE = Summary(
    state="succeeded",
    updates=50,
    reward=RewardSummary(first_fifth=0.21, last_fifth=0.93),
    modes=(ModeBegan(mode="colocated", update=0), ModeBegan(mode="disjoint", update=20)),
    lag=LagSummary(max=1, mean=0.4, bound=1),
    ledger=LedgerSummary(
        submitted=3200, running=0, buffered=0, trained=3200, filtered=0, failed=0, expired=0
    ),
    conservation_violations=0,
    lost=0,
    repeated=0,
    versions=VersionSummary(minted=51, active=51),
    mismatch=4e-4,
    diagnostics=DiagnosticsSummary(
        updates=50,
        terms={
            "total": TermSummary(tokens=1600, mean=0.02, p99=0.2, max=0.4),
            "mismatch": TermSummary(tokens=1600, mean=3.8e-4, p99=2.1e-3, max=4e-3),
            "staleness": TermSummary(tokens=1600, mean=0.02, p99=0.2, max=0.4),
        },
        unmeasured={"kv_cache": "the contract's KV cache is wide: there is nothing to compare"},
        baseline=3.5e-4,
        alarms=(),
    ),
    seconds=SecondsSummary(setup=6.2, training=71.5),
    prompts=examples.PROMPTS,
    lag_policy=LagPolicySummary(
        policy="wait",
        waited_seconds=30.1,
        expired_groups=0,
        masked_tokens=0,
        length=LengthSummary(trained_mean=8.1, published_mean=8.1, dropped_mean=None),
        length_bias=0.0,
    ),
)


def _evidence(record: TheJob, here: Here) -> Evidence:
    try:
        found = evidence_of(here.bus, record)
    except (BadSegment, msgspec.MsgspecError) as error:
        raise Refusal(500, "record-unreadable", str(error)) from None
    if found is None:
        raise Refusal(410, "gone", "Redis no longer knows this job and its folder has no evidence.msgpack")
    return found


@router.get("/summary", responses=describe(Summary, _EXAMPLE))
def summary(record: TheJob, here: Here) -> Response:
    """What came of the job so far; of an ended job, what `summary.json` in its folder says."""
    made = here.large.answer(record, "summary", lambda: encoded(summarise(_evidence(record, here))))
    return Response(made, media_type="application/json")


@router.get(
    "/report",
    response_class=Response,
    responses={
        200: {
            "description": "the report",
            "content": {"text/html": {"schema": {"type": "string"}, "example": "<!doctype html>..."}},
        },
        **PROBLEMS,
    },
)
def report(record: TheJob, here: Here) -> Response:
    """The job's report: one HTML page that asks the network for nothing."""
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
    made = here.large.answer(record, "report", lambda: render(_evidence(record, here)).encode())
    return Response(made, media_type="text/html", headers=headers)

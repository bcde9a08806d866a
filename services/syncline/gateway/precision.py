"""Routes of a job's precision: its contract, how the hardware carries it out, the plan, and what was really used."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Response

from syncline.contract.events import UpdateMetrics
from syncline.contract.plan import PlanEntry
from syncline.contract.precision_trace import COMPONENTS, ComponentTrace
from syncline.contract.recipes import RECIPES
from syncline.contract.streams import METRICS
from syncline.contract.support import Decision, decide
from syncline.contract.version_path import VersionId
from syncline.gateway.access import Gateway, Here, Limit, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.errors import Fault, Refusal
from syncline.gateway.precision_plan import PlanState, contract_of, decision_of, grouped, plan_of
from syncline.gateway.records import JobRecord
from syncline.gateway.reporter import evidence_of
from syncline.gateway.versions import Versions
from syncline.runtime.bus import unpack

router = APIRouter(
    prefix="/v1/jobs/{job}/precision", tags=["precision"], dependencies=[Depends(only_known_parameters)]
)


class PlanGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint tensors that are treated alike. `format` empty: wide."""

    name: str  # numbers between dots stand as `*`
    tensors: int
    shape: tuple[int, ...]
    family: str
    format: str
    reason: str


class PrecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """A job's precision. `validating`: no worker has resolved the plan yet; `unresolved`: none ever did.

    trace      what each component really used; of the newest update that tells. Empty: none has told yet
    """

    job: str
    contract: dict[str, Any]
    digest: str
    decision: Decision
    plan: PlanState
    plan_digest: str | None
    groups: list[PlanGroup]
    traced_update: int | None
    trace: list[ComponentTrace]


class TensorPage(msgspec.Struct, frozen=True, kw_only=True):
    """The plan's entries by name. `next`: give it as `after` for the next page."""

    plan: PlanState
    items: list[PlanEntry]
    next: str | None


_RECIPE = RECIPES["bf16"]
_ENTRY = PlanEntry(name="model.layers.0.mlp.gate.weight", shape=(8, 64), reason="wide: router")
_VIEW = PrecisionView(
    job="j0123456789",
    contract=msgspec.to_builtins(_RECIPE),
    digest=_RECIPE.digest(),
    decision=decide(_RECIPE, "cpu"),
    plan="resolved",
    plan_digest="9f" * 32,
    groups=[
        PlanGroup(
            name="model.layers.*.mlp.gate.weight",
            tensors=2,
            shape=(8, 64),
            family="",
            format="",
            reason="wide: router",
        )
    ],
    traced_update=None,
    trace=[],
)


@router.get("", responses=describe(PrecisionView, _VIEW))
def get_precision(record: TheJob, here: Here) -> Response:
    """The contract, its decision, the plan in groups, and the newest six-component trace."""
    contract = contract_of(record.spec)
    if contract is None:
        raise Refusal(410, "gone", "the job's precision recipe is no longer shipped")
    state, plan = plan_of(here.settings.models, record)
    update, trace = _trace(here, record)
    found = grouped(plan.entries) if plan else {}
    return reply(
        PrecisionView(
            job=record.id,
            contract=msgspec.to_builtins(contract),
            digest=contract.digest(),
            decision=decision_of(here.settings.models, record.spec, contract),
            plan=state,
            plan_digest=plan.digest() if plan else None,
            groups=[
                PlanGroup(name=name, tensors=count, shape=shape, family=family, format=form, reason=reason)
                for (name, family, shape, form, reason), count in found.items()
            ],
            traced_update=update,
            trace=trace,
        )
    )


@router.get(
    "/tensors", responses=describe(TensorPage, TensorPage(plan="resolved", items=[_ENTRY], next=None))
)
def get_tensors(
    record: TheJob,
    here: Here,
    limit: Limit = 500,
    after: Annotated[str | None, Query(description="`next` of the last page")] = None,
) -> Response:
    """Every tensor of the plan: name, shape, family, schemes, reason."""
    state, plan = plan_of(here.settings.models, record)
    entries = plan.entries if plan else ()
    start = 0
    if after is not None:
        start = next((i + 1 for i, entry in enumerate(entries) if entry.name == after), -1)
        if start < 0:
            fault = Fault(path="after", message="names no tensor of the plan", hint="give `next` of a page")
            raise Refusal(422, "parameter-refused", f"after: {fault.message}", errors=(fault,))
    page = list(entries[start : start + limit])
    return reply(
        TensorPage(plan=state, items=page, next=page[-1].name if start + limit < len(entries) else None)
    )


# ---- the trace ------------------------------------------------------------------------------------------------
def _trace(here: Gateway, record: JobRecord) -> tuple[int | None, list[ComponentTrace]]:
    """The trainer's parts of the newest update that has them, with those of the version that it started from."""
    last = _newest(here, record)
    if last is None:
        return None, []
    found = {part.component: part for part in last.trace}
    known = Versions(here, record)
    before = [
        version for version in known.names if version.number == last.update - 1 and version <= _of(last)
    ]
    for base in known.records(before[-1:])[0].values():
        for part in (base.rollout_trace, base.convert_trace):
            if part is not None:
                found[part.component] = part
    return last.update, [found[name] for name in COMPONENTS if name in found]


def _of(metrics: UpdateMetrics) -> VersionId:
    return VersionId(metrics.epoch, metrics.update)


def _newest(here: Gateway, record: JobRecord) -> UpdateMetrics | None:
    if record.recorded:
        rows = here.bus.many([("XREVRANGE", METRICS.at(record.id), "+", "-", "COUNT", 1)])[0]
        last = unpack(rows[0][1][1], UpdateMetrics) if rows else None
    else:
        kept = evidence_of(here.bus, record, whole=False)
        last = kept.metrics[-1] if kept and kept.metrics else None
    return last if last is not None and last.trace else None

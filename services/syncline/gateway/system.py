"""Routes of the installation: health, the gateway's numbers, and what a spec may name."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Depends, Response
from fastapi.responses import PlainTextResponse

from syncline.contract.job import schema
from syncline.contract.recipes import RECIPES
from syncline.gateway import examples, model_root
from syncline.gateway.access import Here, only_known_parameters, scrapers_alone
from syncline.gateway.answers import PROBLEMS, describe, reply
from syncline.gateway.numbers import MEDIA_TYPE
from syncline.gateway.shapes import Health, Named, RecipeList
from syncline.runtime.bus import BusDown

router = APIRouter(tags=["system"], dependencies=[Depends(only_known_parameters)])


@router.get("/healthz", responses=describe(Health, examples.HEALTH))
def healthz() -> Response:
    """200 while the process answers."""
    return reply(Health(ready=True, why=""))


@router.get(
    "/readyz", responses={**describe(Health, examples.HEALTH), **describe(Health, examples.UNREADY, 503)}
)
def readyz(here: Here) -> Response:
    """200 when the gateway reaches Redis; 503 with the reason when not."""
    try:
        here.bus.ping()
    except BusDown as error:
        return reply(Health(ready=False, why=str(error)), 503)
    return reply(Health(ready=True, why=""))


@router.get(
    "/metrics",
    dependencies=[Depends(scrapers_alone)],
    response_class=PlainTextResponse,
    responses={
        200: {
            "description": "Prometheus text",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": examples.NUMBERS}},
        },
        **PROBLEMS,
    },
)
def numbers(here: Here) -> Response:
    """Numbers for Prometheus: of the gateway itself, and of the jobs that run or have ended within 15 minutes."""
    return Response(here.numbers.text(), media_type=MEDIA_TYPE)


@router.get("/v1/recipes", responses=describe(RecipeList, {"items": examples.RECIPES_EXAMPLE}))
def recipes() -> Response:
    """Precision recipes that `precision.recipe` may name."""
    items = {name: msgspec.to_builtins(recipe) for name, recipe in sorted(RECIPES.items())}
    return reply(RecipeList(items=items))


@router.get("/v1/models", responses=describe(Named, examples.MODELS))
def models(here: Here) -> Response:
    """Models that `model.name` may name."""
    return reply(Named(items=model_root.models(here.settings.models)))


@router.get(
    "/v1/schema",
    responses={
        200: {
            "description": "JSON schema of a job spec",
            "content": {"application/json": {"schema": {"type": "object"}, "example": {"title": "JobSpec"}}},
        },
        **PROBLEMS,
    },
)
def spec_schema() -> Response:
    """JSON schema of a job spec, for editors and programs."""
    return reply(schema())

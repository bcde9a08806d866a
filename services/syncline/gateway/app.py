"""The application: the door, the routes, the errors, and the OpenAPI document that describes all three."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi

from syncline.contract.spec_text import MAX_BYTES, MAX_DEPTH, MAX_TABLES, MAX_VALUES
from syncline.gateway import (
    asking,
    errors,
    evaluations,
    events,
    exporting,
    jobs,
    precision,
    progress,
    reports,
    system,
    tempo,
    tracked,
    trajectories,
    ui,
    ui_curves,
    ui_timeline,
    ui_tokens,
    validation,
    versions,
)
from syncline.gateway.access import MAX_STREAMS, MOST_ENTRIES, Gateway, own_jobs_alone
from syncline.gateway.admission import OPEN_PATHS, Admission
from syncline.gateway.answers import components
from syncline.gateway.door import BODY_SECONDS, Door
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings

_TITLE, _VERSION = "syncline", "1"
_SAYS = f"""Jobs go in; jobs, versions and each token's path come out.

Limits: a body has at most {MAX_BYTES} bytes and is complete within {BODY_SECONDS:g} s; a spec nests at most
{MAX_DEPTH} deep, has at most {MAX_VALUES} values and, as TOML, {MAX_TABLES} tables; a page has at most {MOST_ENTRIES}
entries; {MAX_STREAMS} event streams are served at once. Errors are problem+json (RFC 9457).
"""


def create_app(settings: Settings, bus: Bus) -> FastAPI:
    """The gateway over `bus`. Raises `ValueError` for an open host without a token, an empty token, a bad store."""
    gateway = Gateway(settings, bus)
    admission = Admission(settings, gateway.tokens)
    app = FastAPI(
        title=_TITLE,
        version=_VERSION,
        description=_SAYS,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(own_jobs_alone)],
    )
    app.state.gateway = gateway
    parts = (
        ui,
        system,
        jobs,
        asking,
        evaluations,
        precision,
        progress,
        events,
        ui_curves,
        ui_timeline,
        versions,
        exporting,
        validation,
        trajectories,
        ui_tokens,
        reports,
        tracked,
        tempo,
    )
    for part in parts:
        app.include_router(part.router)
    app.state.routes = [*app.routes, *(route for part in parts for route in part.router.routes)]
    errors.install(app)
    app.add_middleware(Door, admission=admission, bus=bus, audit=gateway.audit, numbers=gateway.numbers)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        made = get_openapi(title=_TITLE, version=_VERSION, description=_SAYS, routes=app.routes)
        parts = made.setdefault("components", {})
        parts["schemas"] = components()
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, operations in made["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # a problem, as 4XX says
                operation["security"] = [{}] if path in OPEN_PATHS else [{"token": []}, {}]
        app.openapi_schema = made
    return app.openapi_schema

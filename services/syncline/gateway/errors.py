"""Every error as problem+json (RFC 9457): one shape, for the router's own 404 as for a refused spec."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from syncline.contract.job import Problem as SpecProblem
from syncline.contract.spec_text import SpecError, strict_json
from syncline.contract.token_path import BadTrajectory
from syncline.runtime.bus import BadMessage, BusDown
from syncline.runtime.segments import BadSegment

MEDIA_TYPE = "application/problem+json"
Shape = TypeVar("Shape")


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One place of a request that is wrong. `path`: dotted path in the spec, or the name of a parameter."""

    path: str
    message: str
    hint: str = ""


class ProblemDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9457. `type` is stable: what a program compares. `errors` and `state` come where they apply."""

    type: str
    title: str
    status: int
    detail: str
    errors: tuple[Fault, ...] = ()
    state: str = ""


class Refusal(Exception):
    """A request that gets an answer of its own kind. `kind` becomes `urn:syncline:problem:<kind>`."""

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        errors: tuple[Fault, ...] = (),
        state: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail = status, kind, detail
        self.errors, self.state, self.headers = errors, state, headers


def body_as(body: bytes, shape: type[Shape], path: str = "") -> Shape:
    """`body`, strict JSON, as `shape`. Raises `Refusal` 422, at `path`, and `SpecError` for what is no JSON."""
    try:
        return msgspec.convert(strict_json(body), shape)
    except msgspec.ValidationError as error:
        fault = Fault(path=path, message=str(error))
        raise Refusal(422, "body-refused", str(error), errors=(fault,)) from None


def problem(refusal: Refusal) -> Response:
    """The response that says `refusal`."""
    details = ProblemDetails(
        type=f"urn:syncline:problem:{refusal.kind}",
        title=refusal.kind.replace("-", " ").capitalize(),
        status=refusal.status,
        detail=refusal.detail,
        errors=refusal.errors,
        state=refusal.state,
    )
    return Response(
        msgspec.json.encode(details),
        status_code=refusal.status,
        media_type=MEDIA_TYPE,
        headers=dict(refusal.headers or {}),
    )


def spec_refused(found: list[SpecProblem]) -> Refusal:
    """422 with each problem of a job spec."""
    errors = tuple(Fault(path=p.path, message=p.message, hint=p.hint) for p in found)
    first = errors[0]
    detail = f"{first.path}: {first.message}" if first.path else f"the spec {first.message}"
    return Refusal(422, "spec-refused", detail, errors=errors)


def unknown_job() -> Refusal:
    """404; the same for an id that names nothing and for text that is no id."""
    return Refusal(404, "not-found", "there is no such job")


def redis_away(error: Exception) -> Refusal:
    """503: come back."""
    return Refusal(503, "redis-unreachable", str(error), headers={"Retry-After": "5"})


# ---- handlers ---------------------------------------------------------------------------------------------
def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return problem(error)


def _spec(_: Request, error: Exception) -> Response:
    assert isinstance(error, SpecError)
    return problem(spec_refused(error.problems))


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    kind = phrase.lower().replace(" ", "-")
    detail = "there is nothing at this path" if error.status_code == 404 else str(error.detail)
    headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
    return problem(Refusal(error.status_code, kind, detail, headers=headers))


def _allowed(request: Request) -> str:
    """Methods of every route at this path; the router itself looks no further than the first."""
    methods: set[str] = set()
    for route in request.app.state.routes:
        if isinstance(route, Route) and route.path_regex.match(request.url.path):
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def _parameters(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = tuple(
        Fault(path=".".join(str(part) for part in found["loc"][1:]), message=found["msg"])
        for found in error.errors()
    )
    detail = f"{faults[0].path}: {faults[0].message}"
    return problem(Refusal(422, "parameter-refused", detail, errors=faults))


def _bus_down(_: Request, error: Exception) -> Response:
    return problem(redis_away(error))


def _unreadable(_: Request, error: Exception) -> Response:
    return problem(Refusal(500, "record-unreadable", str(error)))


def _unforeseen(_: Request, error: Exception) -> Response:
    """The server logs the traceback; the client learns that it was not his fault, and no more."""
    detail = "the gateway failed; its log has the reason"
    return problem(Refusal(500, "internal-error", detail, headers={"Connection": "close"}))  # as it then is


def install(app: FastAPI) -> None:
    """Every error of `app` leaves as problem+json."""
    handlers: dict[Any, Any] = {
        Refusal: _refusal,
        SpecError: _spec,
        HTTPException: _http,
        RequestValidationError: _parameters,
        BusDown: _bus_down,
        BadMessage: _unreadable,
        BadTrajectory: _unreadable,
        BadSegment: _unreadable,
        Exception: _unforeseen,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)

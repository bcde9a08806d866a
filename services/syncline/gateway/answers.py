"""What goes out: contract structs as JSON, and the same structs as OpenAPI schemas. One truth for both.

In JSON a version is its name ("0.12"), a number that is not finite is null, bytes never appear.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Response

from syncline.contract.job import schema as spec_schema
from syncline.contract.version_path import VersionId
from syncline.gateway.errors import MEDIA_TYPE, ProblemDetails

_REF = "#/components/schemas/{name}"


def plain(value: Any) -> Any:
    """`value` as what JSON can say. Raises `TypeError` for anything that has no place in an answer."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, VersionId):
        return str(value)
    if isinstance(value, msgspec.Struct):
        named = {name: plain(inner) for name, inner in msgspec.structs.asdict(value).items()}
        config = value.__struct_config__
        return named if config.tag is None else {str(config.tag_field): config.tag, **named}
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, Sequence | array) and not isinstance(value, bytes):
        return [plain(inner) for inner in value]
    raise TypeError(f"{type(value).__name__} has no place in an answer")


def encoded(value: Any) -> bytes:
    """JSON bytes of `plain(value)`."""
    return msgspec.json.encode(plain(value))


def reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(
        encoded(value), status_code=status, media_type="application/json", headers=dict(headers or {})
    )


# ---- the same, described ----------------------------------------------------------------------------------
_DESCRIBED: dict[str, type] = {}


def describe(
    answer: type[msgspec.Struct], example: Any, status: int = 200
) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that answers with `answer`; every route may also answer with a problem."""
    _DESCRIBED[answer.__name__] = answer
    schema = {"$ref": _REF.format(name=answer.__name__)}
    said = (answer.__doc__ or answer.__name__).strip().splitlines()[0]
    content = {"application/json": {"schema": schema, "example": plain(example)}}
    return {status: {"description": said, "content": content}, **PROBLEMS}


def takes(shape: type[msgspec.Struct], example: Any, *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra=` of a route whose body is read as `shape`, a struct without structs inside."""
    schema = msgspec.json.schema_components([shape])[1][shape.__name__]
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": required, "content": content}}


def described_problem() -> dict[str, Any]:
    """The `default` response of every route."""
    example = ProblemDetails(
        type="urn:syncline:problem:not-found", title="Not found", status=404, detail="there is no such job"
    )
    return {
        "description": "A problem (RFC 9457)",
        "content": {
            MEDIA_TYPE: {
                "schema": {"$ref": _REF.format(name="ProblemDetails")},
                "example": msgspec.to_builtins(example),
            }
        },
    }


PROBLEMS: dict[int | str, dict[str, Any]] = {"4XX": described_problem(), "5XX": described_problem()}


def components() -> dict[str, Any]:
    """`components.schemas` of everything that `describe` was asked for, and of the job spec."""
    _, found = msgspec.json.schema_components([*_DESCRIBED.values(), ProblemDetails], ref_template=_REF)
    made = {name: _as_sent(schema) for name, schema in found.items()}
    made["VersionId"] = {
        "type": "string",
        "pattern": r"^\d+\.\d+$",
        "description": "EPOCH.NUMBER",
        "examples": ["0.12"],
    }
    spec = _spec_components()
    if "JobView" in made:
        made["JobView"]["properties"]["spec"] = {"$ref": _REF.format(name="JobSpec")}
    return {**made, **spec}


def _spec_components() -> dict[str, Any]:
    whole = spec_schema()
    parts = whole.pop("$defs")
    moved: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode({**parts, "JobSpec": whole}).replace(b'"#/$defs/', b'"#/components/schemas/')
    )
    return moved


def _as_sent(schema: Any) -> Any:
    """A number that is not finite goes out as null, so each number may be null."""
    if isinstance(schema, list):
        return [_as_sent(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: _as_sent(inner) for name, inner in schema.items()}
    if changed.get("type") == "number":
        changed["type"] = ["number", "null"]
    return changed

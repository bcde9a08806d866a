"""Examples of the Tempo API's answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec

from syncline.gateway import tempo_shapes as shapes
from syncline.gateway.answers import describe

_TRACE, _SPAN = "5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174"
_PAIR = shapes.Pair("trajectory", shapes.AnyValue(stringValue="j0123456789-4-1"))
_FOUND = shapes.FoundSpan(_SPAN, "token.sampled", "1733000000000000000", "420000000", [_PAIR])
_SET = shapes.SpanSet([_FOUND], 1)
BUILD = shapes.BuildInfo(version="syncline-0.1.0")
SEARCH = shapes.SearchAnswer(
    [
        shapes.FoundTrace(
            traceID=_TRACE,
            rootServiceName="scheduler",
            rootTraceName="token.prompted",
            startTimeUnixNano="1733000000000000000",
            durationMs=1840,
            spanSets=[_SET],
            spanSet=_SET,
        )
    ]
)
SCOPES = shapes.TagScopes([shapes.TagScope("span", ["job", "trajectory"])])
TAGS = shapes.TagNames(["job", "trajectory"])
VALUES = shapes.TagValues([shapes.TagValue("string", "j0123456789-4-1")])
VALUES_V1 = shapes.TagValuesV1(["j0123456789-4-1"])
_RESOURCE: dict[str, Any] = {
    "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "rollout"}}]},
    "scopeSpans": [{"scope": {"name": "syncline"}, "spans": [{"name": "token.sampled"}]}],
}
TRACE = shapes.TraceJson({"resourceSpans": [_RESOURCE]})
BATCHES = shapes.BatchesJson([_RESOURCE])


def trace_answers(answer: type[msgspec.Struct], example: Any) -> dict[int | str, dict[str, Any]]:
    """Of a route that answers in JSON or, when asked, in protobuf."""
    described = describe(answer, example)
    binary = {"schema": {"type": "string", "format": "binary"}, "example": "TracesData"}
    described[200]["content"]["application/protobuf"] = binary
    return described

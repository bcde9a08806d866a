"""Routes under `/tempo`: the local span store as Grafana's Tempo data source asks for it (docs/seeing.md).

Written from Tempo's API documentation and from what the data source calls; no Grafana has opened it here.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated
from urllib.parse import unquote

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse

from syncline.gateway import tempo_examples as examples
from syncline.gateway import tempo_shapes as shapes
from syncline.gateway.access import Here, TheWho, only_known_parameters
from syncline.gateway.answers import PROBLEMS, describe
from syncline.gateway.errors import Refusal
from syncline.gateway.tempo_store import Bounds, TempoStore, TooLong
from syncline.gateway.traceql import BadQuery, field_of, parse
from syncline.gateway.traceql_tree import INTRINSICS, Filter
from syncline.runtime.trace_store import SpanRecord
from syncline.runtime.tracing_wire import traces_data, traces_dict, wrapped

_STRICT = [Depends(only_known_parameters)]
router = APIRouter(prefix="/tempo/api", tags=["tempo"])

PROTOBUF = "application/protobuf"
MOST_TRACES, MOST_SPANS, MOST_VALUES = 500, 100, 5000
_FAR = 4_000_000_000

TraceId = Annotated[
    str, Path(description="up to 32 hex digits", examples=["5b8efff798038103d269b633813fc60c"])
]
Tag = Annotated[str, Path(description="scope and name", examples=["span.trajectory"])]
Start = Annotated[
    int | None, Query(ge=0, le=_FAR, description="unix seconds; spans that end before are left out")
]
End = Annotated[
    int | None, Query(ge=0, le=_FAR, description="unix seconds; spans that start later are left out")
]
Text = Annotated[str, Query(description="TraceQL; empty: all")]
Values = Annotated[int, Query(ge=1, le=MOST_VALUES, description="values at most")]


def _store(here: Here) -> TempoStore:
    return here.tempo


Store = Annotated[TempoStore, Depends(_store)]


def _own(here: Here, who: TheWho) -> Bounds:
    return Bounds(jobs=None if who.admin else tuple(job for job, _ in here.history.visible(who)[0]))


Own = Annotated[Bounds, Depends(_own)]
"""Spans of jobs that the asker may see, of any time."""


@router.get(
    "/echo",
    dependencies=_STRICT,
    response_class=PlainTextResponse,
    responses={
        200: {
            "description": "echo",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": "echo"}},
        },
        **PROBLEMS,
    },
)
def echo() -> Response:
    """Grafana's test of the data source."""
    return PlainTextResponse("echo")


@router.get("/status/buildinfo", dependencies=_STRICT, responses=describe(shapes.BuildInfo, examples.BUILD))
def build_info() -> Response:
    """syncline's version."""
    return _reply(shapes.BuildInfo(version=f"syncline-{version('syncline')}"))


@router.get(
    "/v2/traces/{trace}",
    dependencies=_STRICT,
    responses=examples.trace_answers(shapes.TraceJson, examples.TRACE),
)
def trace_v2(
    trace: TraceId, request: Request, store: Store, own: Own, start: Start = None, end: End = None
) -> Response:
    """A whole trace: `TraceByIDResponse` as protobuf, or JSON. `start` and `end` only tell where Tempo must look."""
    spans = _spans(store, trace, own)
    if _wants_protobuf(request):
        return Response(wrapped(traces_data(spans)), media_type=PROTOBUF)
    return _reply(shapes.TraceJson(traces_dict(spans)))


@router.get(
    "/traces/{trace}",
    dependencies=_STRICT,
    responses=examples.trace_answers(shapes.BatchesJson, examples.BATCHES),
)
def trace_v1(
    trace: TraceId, request: Request, store: Store, own: Own, start: Start = None, end: End = None
) -> Response:
    """The same in the older form: `Trace` as protobuf, or JSON."""
    spans = _spans(store, trace, own)
    if _wants_protobuf(request):
        return Response(traces_data(spans), media_type=PROTOBUF)
    return _reply(shapes.BatchesJson(traces_dict(spans).get("resourceSpans", [])))


@router.get("/search", dependencies=_STRICT, responses=describe(shapes.SearchAnswer, examples.SEARCH))
def search(
    store: Store,
    own: Own,
    q: Text = "",
    limit: Annotated[int, Query(ge=1, le=MOST_TRACES, description="traces at most")] = 20,
    spss: Annotated[int, Query(ge=1, le=MOST_SPANS, description="spans per trace at most")] = 3,
    start: Start = None,
    end: End = None,
) -> Response:
    """Traces with spans that a query matches, newest first. 400 for what the local store does not answer."""
    try:
        query = parse(q)
        found = store.search(query, _bounds(own, start, end), limit, spss)
    except (BadQuery, TooLong) as error:
        raise _refused(error) from None
    return _reply(shapes.search_answer(found, query))


@router.get("/v2/search/tags", dependencies=_STRICT, responses=describe(shapes.TagScopes, examples.SCOPES))
def tags_v2(
    scope: Annotated[str, Query(description="span, resource, intrinsic; empty: all")] = "",
    q: Text = "",
    limit: Values = MOST_VALUES,
    start: Start = None,
    end: End = None,
) -> Response:
    """Names that a query may ask for. They are the hops' own, whatever was sampled."""
    named = {
        "span": shapes.SPAN_TAGS,
        "resource": shapes.RESOURCE_TAGS,
        "intrinsic": sorted(INTRINSICS),
    }
    if scope not in ("", "none", *named):
        raise Refusal(400, "query-refused", f"scope: {scope!r} is none of {', '.join(named)}")
    chosen = [name for name in named if scope in ("", "none", name)]
    return _reply(shapes.TagScopes([shapes.TagScope(name, named[name][:limit]) for name in chosen]))


@router.get("/search/tags", dependencies=_STRICT, responses=describe(shapes.TagNames, examples.TAGS))
def tags_v1(start: Start = None, end: End = None, limit: Values = MOST_VALUES) -> Response:
    """The same without scopes."""
    return _reply(
        shapes.TagNames(sorted({*shapes.SPAN_TAGS, *shapes.RESOURCE_TAGS, "name", "status"})[:limit])
    )


@router.get(
    "/v2/search/tag/{tag}/values", dependencies=_STRICT, responses=describe(shapes.TagValues, examples.VALUES)
)
def values_v2(
    tag: Tag, store: Store, own: Own, q: Text = "", limit: Values = 1000, start: Start = None, end: End = None
) -> Response:
    """Values of a tag among the newest spans that `q` (a single `{ }`) matches."""
    return _reply(shapes.TagValues(_values(store, unquote(tag), q, limit, _bounds(own, start, end))))


@router.get(
    "/search/tag/{tag}/values",
    dependencies=_STRICT,
    responses=describe(shapes.TagValuesV1, examples.VALUES_V1),
)
def values_v1(
    tag: Tag, store: Store, own: Own, limit: Values = 1000, start: Start = None, end: End = None
) -> Response:
    """The same without types; a tag without a scope is looked for in both."""
    name = unquote(tag)
    known = name in INTRINSICS or name.startswith((".", "span.", "resource."))
    found = _values(store, name if known else f".{name}", "", limit, _bounds(own, start, end))
    return _reply(shapes.TagValuesV1([one.value for one in found]))


@router.get("/metrics/query_range", include_in_schema=False)
@router.get("/metrics/query", include_in_schema=False)
def metrics_of_traces() -> Response:
    """400, whatever is asked: the local store computes no metrics of traces. Prometheus has them: `/metrics`."""
    raise Refusal(
        400,
        "query-refused",
        "the local store computes no metrics of traces: ask a Prometheus that scrapes /metrics",
    )


# ---- parts ------------------------------------------------------------------------------------------------
def _reply(value: msgspec.Struct) -> Response:
    """JSON in which what is absent does not appear, where this project's own answers say null."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def _spans(store: TempoStore, trace: str, own: Bounds) -> list[SpanRecord]:
    if not 1 <= len(trace) <= 32 or not set(trace.lower()) <= set("0123456789abcdef"):
        raise Refusal(400, "query-refused", "a trace id has up to 32 hex digits")
    try:
        spans = store.trace(trace.lower().rjust(32, "0"), own)
    except TooLong as error:
        raise _refused(error) from None
    if not spans:
        raise Refusal(404, "not-found", "there is no such trace")
    return spans


def _values(store: TempoStore, tag: str, q: str, limit: int, bounds: Bounds) -> list[shapes.TagValue]:
    try:
        field, spans = field_of(tag), parse(q).spans
        if not isinstance(spans, Filter):
            raise BadQuery("values are asked for with a single { }")
        return [
            shapes.tag_value(kind, value, field) for kind, value in store.values(field, spans, bounds, limit)
        ]
    except (BadQuery, TooLong) as error:
        raise _refused(error) from None


def _bounds(own: Bounds, start: int | None, end: int | None) -> Bounds:
    if start is not None and end is not None and start > end:
        raise Refusal(400, "query-refused", "start: is later than end")
    return msgspec.structs.replace(own, start=start, end=end)


def _wants_protobuf(request: Request) -> bool:
    return PROTOBUF in request.headers.get("accept", "")


def _refused(error: BadQuery | TooLong) -> Refusal:
    if isinstance(error, TooLong):
        return Refusal(503, "search-took-too-long", str(error), headers={"Retry-After": "5"})
    return Refusal(400, "query-refused", str(error))

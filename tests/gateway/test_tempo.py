"""The local trace store as Tempo serves it: decoded with OpenTelemetry's own classes, searched, bounded, hostile asked.

No Grafana is run here: what its data source asks for and reads is taken from Tempo's API and its own source.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.trace.v1 import trace_pb2
from serving import SPEC, Server, problem

from syncline.contract.token_path import PROMPTED, SAMPLED, TRAINED
from syncline.contract.version_path import MINTED, VersionId
from syncline.gateway import tempo_store
from syncline.gateway.tempo_shapes import SPAN_TAGS
from syncline.gateway.traceql import parse
from syncline.runtime import tracing
from syncline.runtime.bus import Bus
from syncline.runtime.tokens import TokenStore
from syncline.runtime.trace_store import SpanRecord, TraceStore, spans_of

JOB = "j00000000aa"
AT = 1_700_000_000.0
PROTOBUF = {"Accept": "application/protobuf"}


@pytest.fixture(scope="module")
def traced(another_root: Path) -> dict[str, str]:
    """Three trajectories and a version, told by the real SDK; name -> trace id."""
    found = {}
    tracing.setup("scheduler", "scheduler", another_root / "traces.sqlite", None)
    roots = [_prompted(index) for index in range(3)]
    tracing.setup("rollout", "w0", another_root / "traces.sqlite", None)
    for index, root in enumerate(roots):
        parent = root
        for place in range(index + 1):
            parent = _sampled(index, place, parent)
        found[f"{JOB}-0-{index}"] = root.split("-")[1]
    with tracing.hop(MINTED, links=roots, job=JOB, version=VersionId(0, 1), optimizer_step=1) as hop:
        hop.set(parent=VersionId(0, 0), trajectories=3)
    found["version"] = hop.traceparent.split("-")[1]
    with pytest.raises(RuntimeError), tracing.hop(TRAINED, parent=roots[0], job=JOB):
        raise RuntimeError("the step was lost")
    tracing.setup("unnamed", "unnamed", None, None)
    return found


@pytest.fixture(scope="module")
def another_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced")


@pytest.fixture(scope="module")
def tempo(another_root: Path, traced: dict[str, str], settings: Any) -> Iterator[httpx.Client]:
    changed = msgspec.structs.replace(settings, runs=another_root)
    server = Server(changed, Bus(changed.redis_url, deadline=0.3))
    with httpx.Client(base_url=f"{server.url}/tempo/api", timeout=30) as client:
        yield client
    server.stop()
    server.bus.close()


def _prompted(index: int) -> str:
    return tracing.record(
        PROMPTED, None, AT + index, AT + index, job=JOB, trajectory=f"{JOB}-0-{index}", group=0, index=index
    )


def _sampled(index: int, place: int, parent: str) -> str:
    began = AT + index + place + 0.25
    return tracing.record(
        SAMPLED,
        parent,
        began,
        began + 0.5,
        job=JOB,
        trajectory=f"{JOB}-0-{index}",
        attempt=1,
        worker="w0",
        version=VersionId(0, place),
        digest="d",
        context="recomputed",
        start=place * 4,
        end=place * 4 + 4,
    )


def search(tempo: httpx.Client, q: str, **more: Any) -> list[dict[str, Any]]:
    answer = tempo.get("/search", params={"q": q, **more})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["traces"]
    return found


def trace_by_id_response() -> Any:
    """Tempo's own message, from its .proto, around OpenTelemetry's `TracesData`, which has the form of its `Trace`."""
    file = descriptor_pb2.FileDescriptorProto(
        name="tempo.proto", package="tempopb", syntax="proto3", dependency=[trace_pb2.DESCRIPTOR.name]
    )
    message = file.message_type.add(name="TraceByIDResponse")
    message.field.add(
        name="trace", number=1, type=11, label=1, type_name=".opentelemetry.proto.trace.v1.TracesData"
    )
    message.field.add(name="status", number=3, type=5, label=1)
    message.field.add(name="message", number=4, type=9, label=1)
    pool = descriptor_pool.Default()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tempopb.TraceByIDResponse"))


def test_a_trace_decodes_with_the_real_messages(
    tempo: httpx.Client, traced: dict[str, str], another_root: Path
) -> None:
    name = f"{JOB}-0-2"
    stored = spans_of(another_root / "traces.sqlite", trajectory=name)
    answer = tempo.get(f"/v2/traces/{traced[name]}", headers=PROTOBUF, params={"start": 1, "end": 2})
    assert answer.headers["content-type"] == "application/protobuf"
    whole = trace_by_id_response().FromString(answer.content)
    assert (whole.status, whole.message) == (0, "")
    older = trace_pb2.TracesData.FromString(tempo.get(f"/traces/{traced[name]}", headers=PROTOBUF).content)
    assert older == whole.trace
    spans = {}
    for resource in older.resource_spans:
        said = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                spans[span.span_id.hex()] = (said["service.name"], said["service.instance.id"], span)
    assert spans.keys() == {one.span_id for one in stored}
    for one in stored:
        service, instance, span = spans[one.span_id]
        assert (service, instance, span.name) == (one.service, one.instance, one.name)
        assert span.trace_id.hex() == one.trace_id
        assert span.parent_span_id.hex() == (one.parent_id or "")
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (one.start_ns, one.end_ns)
        told = {p.key: getattr(p.value, p.value.WhichOneof("value")) for p in span.attributes}
        assert told == one.attributes
    sampled = [one for one in stored if one.name == "token.sampled"]
    assert len(sampled) == 3


def test_links_and_errors_come_along(tempo: httpx.Client, traced: dict[str, str]) -> None:
    answer = tempo.get(f"/traces/{traced['version']}", headers=PROTOBUF)
    [resource] = trace_pb2.TracesData.FromString(answer.content).resource_spans
    [span] = resource.scope_spans[0].spans
    assert {link.trace_id.hex() for link in span.links} == {traced[f"{JOB}-0-{n}"] for n in range(3)}
    answer = tempo.get(f"/traces/{traced[f'{JOB}-0-0']}", headers=PROTOBUF)
    spans = [
        span
        for resource in trace_pb2.TracesData.FromString(answer.content).resource_spans
        for span in resource.scope_spans[0].spans
    ]
    [failed] = [span for span in spans if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR]
    assert (failed.name, failed.status.message) == ("token.trained", "RuntimeError: the step was lost")


def test_json_is_the_same_trace(tempo: httpx.Client, traced: dict[str, str]) -> None:
    trace = traced[f"{JOB}-0-1"]
    whole = trace_pb2.TracesData.FromString(tempo.get(f"/traces/{trace}", headers=PROTOBUF).content)
    newer = tempo.get(f"/v2/traces/{trace}").json()["trace"]
    older = tempo.get(f"/traces/{trace}").json()["batches"]
    assert ParseDict(newer, trace_pb2.TracesData()) == whole
    assert ParseDict({"resourceSpans": older}, trace_pb2.TracesData()) == whole


@pytest.mark.parametrize("path", ["/v2/traces/{}", "/traces/{}"])
def test_a_trace_that_is_none(tempo: httpx.Client, traced: dict[str, str], path: str) -> None:
    problem(tempo.get(path.format("f" * 32)), 404)
    for bad in ("xyz", "f" * 33, "%27%20or%201%3D1"):
        problem(tempo.get(path.format(bad)), 400)
    short = traced["version"].lstrip("0")
    assert tempo.get(path.format(short.upper())).status_code == 200


def test_search_by_trajectory_is_what_grafana_reads(
    tempo: httpx.Client, traced: dict[str, str], another_root: Path
) -> None:
    name = f"{JOB}-0-2"
    stored = spans_of(another_root / "traces.sqlite", trajectory=name)[1]
    [trace] = search(tempo, f'{{ span.trajectory = "{name}" }} | select(span.version, span.end)', spss=2)
    assert trace["traceID"] == traced[name]
    assert (trace["rootServiceName"], trace["rootTraceName"]) == ("scheduler", "token.prompted")
    assert trace["startTimeUnixNano"] == str(int((AT + 2) * 1e9))
    assert trace["durationMs"] == 2750
    [matched] = trace["spanSets"]
    assert (matched, matched["matched"], len(matched["spans"])) == (trace["spanSet"], 4, 2)
    sampled = matched["spans"][1]
    assert (sampled["name"], sampled["durationNanos"]) == (
        "token.sampled",
        str(stored.end_ns - stored.start_ns),
    )
    said = {pair["key"]: pair["value"] for pair in sampled["attributes"]}
    assert said == {
        "trajectory": {"stringValue": name},
        "version": {"stringValue": "0.0"},
        "end": {"intValue": "4"},
    }


CASES: list[tuple[str, set[str]]] = [
    ("", {"0", "1", "2", "version"}),
    ("{ }", {"0", "1", "2", "version"}),
    ('{ name = "token.sampled" && span.start >= 4 }', {"1", "2"}),
    ("{ span.start > 4 || .trajectories = 3 }", {"2", "version"}),
    ('{ .job = "j00000000aa" && name != "token.prompted" }', {"0", "1", "2", "version"}),
    ('{ resource.service.name = "scheduler" }', {"0", "1", "2"}),
    ('{ .service.name = "rollout" && span.version = "0.2" }', {"2"}),
    ('{ name =~ "version.*" }', {"version"}),
    ('{ name =~ "minted" }', set()),
    ('{ span.trajectory =~ ".*-[12]" && name = "token.prompted" }', {"1", "2"}),
    ('{ name !~ "token.*" }', {"version"}),
    ("{ status = error }", {"0"}),
    ('{ statusMessage =~ ".*lost" }', {"0"}),
    ("{ duration > 400ms && duration <= 0.51s }", {"0", "1", "2"}),
    ("{ traceDuration > 2s && traceDuration < 1h }", {"2"}),
    ('{ rootName = "version.minted" }', {"version"}),
    ('{ rootServiceName = "scheduler" && span.version = "0.1" }', {"1", "2"}),
    ("{ span.trajectory = nil }", {"version", "0"}),
    ('{ !(name =~ "token.*") }', {"version"}),
    ("{ kind = internal && span.optimizer_step != nil }", {"version"}),
    ('{ span.version = "0.1" } && { span.version = "0.2" }', {"2"}),
    ('{ span.version = "0.2" } || { span.trajectories > 0 }', {"2", "version"}),
    ('{ name = "token.sampled" } | count() > 1', {"1", "2"}),
    ("{ span.start > 100 }", set()),
    ("{ span.unheard = 1 }", set()),
    ("{ 8 = span.start }", {"2"}),
    ("{ span.start = `8` }", set()),
    ("{ false }", set()),
]


@pytest.mark.parametrize(("q", "expected"), CASES, ids=[q for q, _ in CASES])
def test_search(tempo: httpx.Client, traced: dict[str, str], q: str, expected: set[str]) -> None:
    names = {trace: name.rpartition("-")[2] for name, trace in traced.items()}
    assert {names[trace["traceID"]] for trace in search(tempo, q)} == expected


def test_search_is_bounded_in_time_and_number(tempo: httpx.Client, traced: dict[str, str]) -> None:
    assert [t["traceID"] for t in search(tempo, '{ name = "token.prompted" }', limit=2)] == [
        traced[f"{JOB}-0-{n}"] for n in (2, 1)
    ]
    only = search(tempo, '{ name = "token.prompted" }', start=int(AT) + 1, end=int(AT) + 1)
    assert [t["traceID"] for t in only] == [traced[f"{JOB}-0-1"]]
    assert search(tempo, "{ }", start=1, end=2) == []
    problem(tempo.get("/search", params={"start": 5, "end": 4}), 400)
    problem(tempo.get("/search", params={"limit": 100_000}), 422)
    problem(tempo.get("/search", params={"tags": "service.name=rollout"}), 422)


def test_tags_are_the_hops_own(tempo: httpx.Client) -> None:
    scopes = {s["name"]: s["tags"] for s in tempo.get("/v2/search/tags").json()["scopes"]}
    assert scopes["span"] == SPAN_TAGS
    assert scopes["resource"] == ["service.instance.id", "service.name"]
    assert {"name", "duration", "status"} <= set(scopes["intrinsic"])
    assert [s["name"] for s in tempo.get("/v2/search/tags?scope=resource").json()["scopes"]] == ["resource"]
    problem(tempo.get("/v2/search/tags?scope=event"), 400)
    names = tempo.get("/search/tags").json()["tagNames"]
    assert {"trajectory", "version", "service.name"} <= set(names)
    assert len(tempo.get("/v2/search/tags?limit=2").json()["scopes"][0]["tags"]) == 2


def test_values_of_a_tag(tempo: httpx.Client, traced: dict[str, str]) -> None:
    def values(tag: str, **more: Any) -> list[tuple[str, str]]:
        answer = tempo.get(f"/v2/search/tag/{tag}/values", params=more)
        assert answer.status_code == 200, answer.text
        return [(one["type"], one["value"]) for one in answer.json()["tagValues"]]

    ids = [("string", f"{JOB}-0-{n}") for n in range(3)]
    assert values("span.trajectory") == ids
    assert values(urllib.parse.quote(urllib.parse.quote("span.trajectory", safe=""), safe="")) == ids
    assert values("span.trajectory", q='{ span.version = "0.2" }') == ids[2:]
    assert values("span.trajectory", limit=1) == ids[:1]
    assert values("span.start") == [("int", "0"), ("int", "4"), ("int", "8")]
    assert values("resource.service.name") == [("string", "rollout"), ("string", "scheduler")]
    assert values("status") == [("keyword", "error"), ("keyword", "unset")]
    assert values("name", q="{ span.start = 8 }") == [("string", "token.sampled")]
    assert values("span.trajectory", start=1, end=2) == []
    assert tempo.get("/search/tag/trajectory/values").json() == {"tagValues": [value for _, value in ids]}
    assert tempo.get("/search/tag/service.name/values").json() == {"tagValues": ["rollout", "scheduler"]}
    problem(tempo.get("/v2/search/tag/event.x/values"), 400)
    problem(tempo.get("/v2/search/tag/span.a/values", params={"q": "{ } && { }"}), 400)


REFUSED = [
    ("{ span.a = }", "a value was expected"),
    ("{ span.a = 1 } >> { span.b = 2 }", "structure operators"),
    ("{ } | rate()", "`| count() > N` and `| select(...)` alone"),
    ("{ } | by(span.job)", "alone"),
    ("{ event.name = `x` }", "scopes are span. and resource."),
    ("{ span.a =~ 1 }", "takes a pattern in quotes"),
    ('{ name =~ "(" }', "is no pattern"),
    ('{ name =~ "' + "a" * 300 + '" }', "at most 256 characters"),
    ("{ status = 1 }", "compared with a status"),
    ("{ span.a = error }", "in quotes"),
    ("{ duration = true }", "duration or number"),
    ('{ span."a\\"b" = 1 }', "no quotes"),
    ("{ span.a = 1 }; drop table spans", "no TraceQL"),
    ("{" + "(" * 5000, "characters"),
    ("{" + "(" * 30 + "true" + ")" * 30 + "}", "nests at most"),
    ("{" + " && ".join(["span.a = 1"] * 65) + "}", "at most 64 conditions"),
    ('{ name = "\x00" ', "expected"),
]


@pytest.mark.parametrize(("q", "why"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_is_not_answered_is_refused_with_a_reason(tempo: httpx.Client, q: str, why: str) -> None:
    assert why in problem(tempo.get("/search", params={"q": q}), 400)["detail"]


@pytest.mark.parametrize("path", ["/metrics/query_range", "/metrics/query"])
def test_metrics_of_traces_are_refused(tempo: httpx.Client, path: str) -> None:
    assert (
        "Prometheus"
        in problem(tempo.get(path, params={"q": "{ } | rate()", "step": "15s", "exemplars": 9}), 400)[
            "detail"
        ]
    )


def test_values_of_a_query_are_never_sql(tempo: httpx.Client, traced: dict[str, str]) -> None:
    assert search(tempo, "{ span.trajectory = \"x' or '1'='1\" }") == []
    assert search(tempo, '{ span.trajectory = `") or 1=1 --` }') == []
    assert search(tempo, '{ span."a\') or 1=1 --" = 1 }') == []
    assert len(search(tempo, "")) == 4


def many(path: Path, spans: int) -> None:
    store = TraceStore(path)
    store.write(
        SpanRecord(
            trace_id=f"{n + 1:032x}",
            span_id=f"{n + 1:016x}",
            parent_id=None,
            name="token.prompted",
            service="scheduler",
            instance="scheduler",
            start_ns=int((AT + n / 1000) * 1e9),
            end_ns=int((AT + n / 1000) * 1e9) + 1,
            attributes={"job": JOB, "trajectory": f"{JOB}-{n}-0", "group": n, "index": 0},
        )
        for n in range(spans)
    )
    store.close()


def test_a_search_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path / "t.sqlite", 5_000)
    store = tempo_store.TempoStore(tmp_path / "t.sqlite")
    hostile = parse('{ name =~ "(a*)*(b*)*c" || span.trajectory =~ "(.*)*x" }')  # exponential by backtracking
    began = time.monotonic()
    assert store.search(hostile, tempo_store.Bounds(), 20, 3) == []
    assert time.monotonic() - began < tempo_store.SECONDS
    one = store.search(parse(f'{{ span.trajectory = "{JOB}-777-0" }}'), tempo_store.Bounds(), 20, 3)
    assert [found.trace_id for found in one] == [f"{778:032x}"]
    monkeypatch.setattr(tempo_store, "SECONDS", 0.001)
    with pytest.raises(tempo_store.TooLong, match="took more than"):
        store.search(parse("{ traceDuration > 1h }"), tempo_store.Bounds(), 20, 3)


def test_a_store_that_is_not_there_is_empty(another: Callable[..., Server], tmp_path: Path) -> None:
    server = another(runs=tmp_path / "none")
    assert server.http.get("/tempo/api/search").json()["traces"] == []
    problem(server.http.get(f"/tempo/api/traces/{'a' * 32}"), 404)
    assert server.http.get("/tempo/api/v2/search/tag/span.job/values").json() == {"tagValues": []}


def test_the_door_guards_it(
    another: Callable[..., Server], another_root: Path, traced: dict[str, str]
) -> None:
    server = another(runs=another_root, token="a-token-of-many-letters")
    problem(server.http.get("/tempo/api/echo"), 401)
    problem(server.http.get("/tempo/api/search"), 401)
    held = {"Authorization": "Bearer a-token-of-many-letters"}
    assert server.http.get("/tempo/api/echo", headers=held).text == "echo"
    assert json.loads(server.http.get("/tempo/api/search", headers=held).content)["traces"]
    info = server.http.get("/tempo/api/status/buildinfo", headers=held).json()
    assert info["version"].startswith("syncline-")


def test_a_tenant_sees_traces_of_its_own_jobs(another: Callable[..., Server], tmp_path: Path) -> None:
    server = another(runs=tmp_path, token="the-operator-s-own-token")
    tokens = {
        tenant: TokenStore(server.settings.token_store).add(tenant, "member")[1]
        for tenant in ("alpha", "beta")
    }

    def get(tenant: str, path: str, **params: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {tokens[tenant]}"}
        return server.http.get(f"/tempo/api{path}", params=params, headers=headers)

    jobs, traces = {}, {}
    tracing.setup("scheduler", "scheduler", server.settings.traces, None)
    for tenant, text in tokens.items():
        answer = server.http.post("/v1/jobs", json=SPEC, headers={"Authorization": f"Bearer {text}"})
        job = jobs[tenant] = str(answer.json()["id"])
        root = tracing.record(PROMPTED, None, AT, AT, job=job, trajectory=f"{job}-0-0", group=0, index=0)
        traces[tenant] = root.split("-")[1]
    tracing.setup("unnamed", "unnamed", None, None)
    for tenant, other in (("alpha", "beta"), ("beta", "alpha")):
        assert [t["traceID"] for t in get(tenant, "/search").json()["traces"]] == [traces[tenant]]
        for q in ('{ name = "token.prompted" } || { duration >= 0s }', "{ !(span.job = `x`) }"):
            assert [t["traceID"] for t in get(tenant, "/search", q=q).json()["traces"]] == [traces[tenant]]
        values = get(tenant, "/v2/search/tag/span.job/values").json()["tagValues"]
        assert values == [{"type": "string", "value": jobs[tenant]}]
        for path in ("/traces/{}", "/v2/traces/{}"):
            assert get(tenant, path.format(traces[tenant])).status_code == 200
            problem(get(tenant, path.format(traces[other])), 404)
        problem(get(tenant, "/search", q=f'{{ span.trajectory = "{jobs[other]}-0-0" }}'), 404)
    headers = {"Authorization": "Bearer the-operator-s-own-token"}
    seen = server.http.get("/tempo/api/search", headers=headers).json()["traces"]
    assert {one["traceID"] for one in seen} == set(traces.values())

"""A real job: every panel's expression finds numbers of it, every trace query its attributes, every hop its place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from boards_read import Asked, queries
from seen import SPEC, Seen
from waiting import wait_until

from syncline.contract.token_path import TOKEN_PATH
from syncline.contract.version_path import VERSION_PATH
from syncline.gateway.traceql import parse
from syncline.runtime.trace_store import SpanRecord, parse_traceparent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOKEN, VERSION = ([hop.name for hop in path] for path in (TOKEN_PATH, VERSION_PATH))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    found = Seen(tmp_path_factory.mktemp("seen"))
    assert found.status["state"] == "succeeded", found.status
    yield found
    found.close()


@pytest.fixture(scope="module")
def spans(seen: Seen) -> list[SpanRecord]:
    """All spans, once every trained trajectory has told its last hop."""
    trained = seen.stack.summary(seen.job)["ledger"]["trained"]
    assert trained >= SPEC["schedule"]["updates"]

    def whole() -> list[SpanRecord] | None:
        found = seen.spans()
        return found if sum(span.name == "token.trained" for span in found) == trained else None

    return wait_until(whole, 30, "all spans are in the store")


@pytest.mark.parametrize("asked", list(queries("prometheus")), ids=str)
def test_every_panel_shows_something(seen: Seen, asked: Asked) -> None:
    found = seen.prometheus.range(asked.filled(seen.job, "5s", "120s"))
    assert found, f"no series: {asked.text}"


def test_the_scrape_agrees_with_the_records(seen: Seen) -> None:
    """Counters in Prometheus against the job's own summary."""
    summary = seen.stack.summary(seen.job)
    of_job = f'{{job_id="{seen.job}"}}'

    def value(metric: str) -> float:
        [found] = seen.prometheus.newest(f"{metric}{of_job}").values()
        return found

    assert value("syncline_updates_total") == SPEC["schedule"]["updates"]
    assert value("syncline_trained_trajectories_total") == summary["ledger"]["trained"]
    assert value("syncline_submitted_trajectories_total") == summary["ledger"]["submitted"]
    assert value("syncline_lag_count") == summary["ledger"]["trained"]
    assert value("syncline_lag_sum") / value("syncline_lag_count") == pytest.approx(summary["lag"]["mean"])
    states = seen.prometheus.newest(f"sum by (state) (syncline_trajectories{of_job})")
    assert sum(states.values()) == summary["ledger"]["submitted"]
    told = seen.stack.get(f"/v1/jobs/{seen.job}/phases?limit=500")["items"]
    [phases] = seen.prometheus.newest(f"sum(syncline_phase_seconds_total{of_job})").values()
    assert phases == pytest.approx(told[-1]["at"] - told[0]["at"], abs=0.5)
    [most] = seen.prometheus.newest(f"max(rate(syncline_busy_seconds_total{of_job}[60s]) > 0)").values() or [
        0.0
    ]
    assert most <= 1.05, "an engine cannot be busier than always"


def test_labels_hold_no_ids_but_the_job_s(seen: Seen) -> None:
    """Of every series that the run has made: few, and none by trajectory or version."""
    answer = seen.prometheus.http.get("/series", params={"match[]": '{__name__=~"syncline_.*"}'}).json()
    values = defaultdict(set)
    for series in answer["data"]:
        for name, value in series.items():
            values[name].add(value)
    assert values["job_id"] == {seen.job, ""} or values["job_id"] == {seen.job}
    assert values["worker"] == {"w0", "w1", "trainer"}
    for name, found in values.items():
        if name not in ("__name__", "le"):
            assert len(found) <= 64, f"{name}: {len(found)} values"
        assert not any(f"{seen.job}-" in value for value in found), name
    assert len(answer["data"]) < 1500


@pytest.mark.parametrize("asked", list(queries("tempo")), ids=str)
def test_every_trace_query_asks_for_what_was_exported(
    seen: Seen, spans: list[SpanRecord], asked: Asked
) -> None:
    trajectory = next(str(span.attributes["trajectory"]) for span in spans if span.name == "token.trained")
    text = asked.filled(seen.job, "5s", "120s", trajectory)
    exported = {name for span in spans for name in span.attributes} | {"error"}  # no hop failed
    for field in parse(text).fields():
        assert field.scope == "intrinsic" or field.name in exported, f"{field} was exported by nobody"
    answer = seen.stack.http.get(f"{seen.stack.url}/tempo/api/search", params={"q": text, "limit": 5})
    assert answer.status_code == 200, answer.text
    found = answer.json()["traces"]
    if asked.panel in ("Failed hops", "Rewards that took over a second, or gave no score"):
        return  # of a job in which nothing went wrong
    assert found, f"no trace: {text}"


# ---- the hops -----------------------------------------------------------------------------------------------
def by_trajectory(spans: list[SpanRecord]) -> dict[str, list[SpanRecord]]:
    found: dict[str, list[SpanRecord]] = {}
    for span in spans:
        if span.name in TOKEN and "trajectory" in span.attributes:
            found.setdefault(str(span.attributes["trajectory"]), []).append(span)
    return {name: own for name, own in found.items() if any(s.name == "token.trained" for s in own)}


def test_every_hop_says_whose_it_is(seen: Seen, spans: list[SpanRecord]) -> None:
    assert {span.name for span in spans} == {*TOKEN, *VERSION}
    by = {hop.name: hop.done_by for hop in (*TOKEN_PATH, *VERSION_PATH)}
    for span in spans:
        assert span.attributes["job"] == seen.job
        assert ("trajectory" in span.attributes) == (span.name in TOKEN), span.name
        assert "version" in span.attributes or span.name in TOKEN, span.name
        assert span.service == by[span.name]
        if "worker" in span.attributes:
            assert span.instance == span.attributes["worker"]


def test_a_trajectory_is_one_trace_across_streams_and_celery(spans: list[SpanRecord]) -> None:
    """Each hop follows the one before it: what a stream entry, a Celery header and a record carried is its parent."""
    for name, own in by_trajectory(spans).items():
        assert len({span.trace_id for span in own}) == 1, name
        ids = {span.span_id: span for span in own}
        parents = {
            span.name: [ids[s.parent_id].name for s in own if s.name == span.name and s.parent_id]
            for span in own
        }
        assert parents["token.prompted"] == []
        assert parents["token.sampled"][0] == "token.prompted"
        assert set(parents["token.sampled"][1:]) <= {"token.sampled"}
        assert parents["token.published"] == ["token.sampled"]
        assert parents["token.rewarded"] == ["token.published"]
        for hop in ("token.admitted", "token.scored", "token.trained"):
            assert parents[hop] == ["token.sampled"]


def test_batches_and_versions_are_joined_by_links(spans: list[SpanRecord]) -> None:
    contexts = {(span.trace_id, span.span_id): span for span in spans}

    def linked(span: SpanRecord) -> list[SpanRecord]:
        ids = [parse_traceparent(link) for link in span.links]
        return [contexts[f"{trace:032x}", f"{one:016x}"] for trace, one, _ in ids]

    for span in spans:
        if span.name == "token.sampled":
            [active] = linked(span)
            assert (active.name, active.attributes["version"]) == (
                "version.active",
                span.attributes["version"],
            )
            assert active.attributes["worker"] == span.attributes["worker"]
        if span.name == "token.trained":
            [minted] = linked(span)
            assert (minted.name, minted.attributes["version"]) == (
                "version.minted",
                span.attributes["minted"],
            )
        if span.name == "version.minted":
            assert len(span.links) == span.attributes["trajectories"]
            assert {one.name for one in linked(span)} <= {"token.sampled"}
    paths: dict[str, set[str]] = defaultdict(set)
    for span in spans:
        if span.name in VERSION:
            paths[str(span.attributes["version"])].add(span.trace_id)
    assert all(len(traces) == 1 for traces in paths.values()), "a version's path is one trace"


def test_spans_of_a_trajectory_do_not_grow_with_its_length(spans: list[SpanRecord]) -> None:
    """Six hops and one per version span, for the shortest response as for the longest."""
    counts: dict[int, set[int]] = defaultdict(set)
    lengths: Counter[str] = Counter()
    for own in by_trajectory(spans).values():
        [published] = [span for span in own if span.name == "token.published"]
        tokens, parts = published.attributes["tokens"], published.attributes["spans"]
        assert isinstance(tokens, int)
        assert isinstance(parts, int)
        assert 1 <= parts <= 1 + SPEC["schedule"]["max_lag"]
        lengths["short" if tokens <= 4 else "long" if tokens >= 24 else "other"] += 1
        counts[parts].add(len(own))
    assert lengths["short"] > 0, "no response is short"
    assert lengths["long"] > 0, "no response is long"
    assert dict(counts) == {parts: {len(TOKEN) - 1 + parts} for parts in counts}


def test_nothing_was_lost_and_the_numbers_say_so(seen: Seen, spans: list[SpanRecord]) -> None:
    lost = seen.prometheus.range('max by (why) (syncline_spans_missing{why=~"incomplete|skewed|links"})')
    assert {one["metric"]["why"] for one in lost} == {"incomplete", "skewed", "links"}
    assert all(float(value) == 0 for one in lost for _, value in one["values"])
    errands = seen.prometheus.newest('syncline_spans_total{service="errands"}')
    rewarded = sum(span.name == "token.rewarded" for span in spans)
    assert list(errands.values()) == [rewarded], "the hops of a Celery worker's children are counted"

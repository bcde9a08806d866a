"""The boards are what their source makes, valid by Grafana's own types, and ask for what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest
import quickjs
import yaml
from boards_read import MAKE, ROOT, Asked, boards, queries
from test_tempo import CASES, REFUSED

from syncline.gateway.metrics_names import METRICS, page
from syncline.gateway.tempo_shapes import HOPS, RESOURCE_TAGS
from syncline.gateway.traceql import BadQuery, parse

HERE = Path(__file__).parent
PROM, TEMPO = list(queries("prometheus")), list(queries("tempo"))
NOT_SHOWN = {
    "syncline_jobs_left_out": "an alert's, not a picture's",
    "syncline_process_up": "process_ready says more",
    "syncline_updates_skipped_total": "an alert's",
    "syncline_kl": "only jobs with a reference policy have it",
    "syncline_weights_truncated": "only jobs that correct their weights have it",
    "syncline_probed_tokens_total": "how much the terms rest on",
    "syncline_pull_seconds": "version_seconds has its stages",
    "syncline_mismatch_by_lag_mean": "the quantiles are",
}


def filled(asked: Asked) -> str:
    return asked.filled("j0123456789|j1123456789", "1m", "1h", "j0123456789-1-2")


def test_they_are_what_their_source_makes() -> None:
    done = subprocess.run([sys.executable, MAKE, "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"run python helm/dashboards/make.py\n{done.stdout}{done.stderr}"


def test_the_page_of_numbers_is_up_to_date() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == page(), "run python -m syncline.gateway.metrics_names > docs/metrics.md"


SCHEMA = jsonschema.Draft7Validator(json.loads((HERE / "dashboard.schema.json").read_text()))


@pytest.mark.parametrize("name", boards())
def test_they_are_valid_by_grafana_s_own_types(name: str) -> None:
    faults = [f"{list(e.absolute_path)}: {e.message}" for e in SCHEMA.iter_errors(boards()[name])]
    assert faults == []


def _spoilt(change: str) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(json.dumps(boards()["run-overview"]))
    match change:
        case "title":
            board["title"] = 7
        case "gridPos":
            board["panels"][0]["gridPos"]["heigth"] = 3
        case "unknown":
            board["panel"] = []
        case "variable":
            board["templating"]["list"][0]["kind"] = "x"
    return board


@pytest.mark.parametrize("change", ["title", "gridPos", "unknown", "variable"])
def test_the_schema_has_teeth(change: str) -> None:
    assert list(SCHEMA.iter_errors(_spoilt(change)))


def test_each_is_one_of_six_with_a_name_of_its_own() -> None:
    assert sorted(boards()) == [
        "data-plane",
        "phases",
        "precision",
        "run-overview",
        "token-path",
        "version-path",
    ]
    assert len({board["uid"] for board in boards().values()}) == 6
    for name, board in boards().items():
        assert [v["name"] for v in board["templating"]["list"]][:3] == ["prometheus", "tempo", "job_id"], name
        assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"]), name
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
        assert len(set(places)) == len(places), name


# ---- PromQL -------------------------------------------------------------------------------------------------
LABELS = {f"{m.name}{'_total' if m.kind == 'counter' else ''}": set(m.labels) for m in METRICS}
LABELS |= {
    f"{m.name}_{end}": {*m.labels, *(["le"] if end == "bucket" else [])}
    for m in METRICS
    if m.kind == "histogram"
    for end in ("bucket", "sum", "count")
}
LABELS |= {
    "syncline_gateway_requests_total": {"method", "route", "status"},
    "syncline_gateway_seconds_bucket": {"route", "le"},
}


def selectors(tree: Any) -> list[tuple[str, set[str]]]:
    """(metric, labels matched) of every selector of an expression."""
    if isinstance(tree, promql_parser.VectorSelector):
        assert tree.name is not None, "a selector without a metric's name"
        return [(tree.name, {matcher.name for matcher in tree.matchers.matchers})]
    parts = [getattr(tree, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    parts += list(getattr(tree, "args", None) or [])
    return [found for part in parts if part is not None for found in selectors(part)]


@pytest.mark.parametrize("asked", PROM, ids=str)
def test_expressions_ask_for_numbers_that_there_are(asked: Asked) -> None:
    found = selectors(promql_parser.parse(filled(asked)))
    assert found, asked.text
    for metric, labels in found:
        assert metric in LABELS, f"{metric} is told by nobody"
        assert labels <= LABELS[metric], f"{metric} has labels {LABELS[metric]}"
    kept = {name.strip() for by in re.findall(r" by \(([^)]*)\)", asked.text) for name in by.split(",")}
    assert kept <= set().union(*(LABELS[metric] for metric, _ in found)), asked.text


def test_the_parser_has_teeth() -> None:
    for bad in ("rate(syncline_update)", "max by (", "syncline_update[5m] +"):
        with pytest.raises(ValueError):
            promql_parser.parse(bad)


def test_each_number_is_shown_or_said_not_to_be() -> None:
    names = {
        re.sub("_(bucket|sum|count)$", "", metric)
        for a in PROM
        for metric, _ in selectors(promql_parser.parse(filled(a)))
    }
    told = {f"{m.name}{'_total' if m.kind == 'counter' else ''}" for m in METRICS}
    assert told - names == set(NOT_SHOWN)


def test_alert_rules_ask_for_numbers_that_there_are() -> None:
    rules = yaml.safe_load((ROOT / "helm" / "syncline" / "rules.yaml").read_text())
    exprs = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    recorded = {rule.get("record") for group in rules["groups"] for rule in group["rules"]}
    assert exprs
    for expr in exprs:
        for metric, labels in selectors(promql_parser.parse(expr)):
            if metric.startswith("syncline_") and metric not in recorded:
                assert metric in LABELS, f"{metric} is told by nobody"
                assert labels <= LABELS[metric] | {"job", "instance"}, expr


# ---- TraceQL ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def grammar() -> Any:
    """Grafana's grammar: text -> (name, from, to) of each node."""
    context = quickjs.Context()
    context.eval((HERE / "traceql_grammar.js").read_text())
    run = context.eval("traceql.nodes")
    return lambda text: json.loads(run(text))


def errors(nodes: list[list[Any]]) -> list[list[Any]]:
    return [node for node in nodes if node[0] == "⚠"]


@pytest.mark.parametrize("asked", TEMPO, ids=str)
def test_traces_are_asked_for_in_grafana_s_own_grammar(asked: Asked, grammar: Any) -> None:
    assert not errors(grammar(filled(asked)))
    parse(filled(asked))


def test_the_grammar_has_teeth(grammar: Any) -> None:
    for bad in ("{ span.a = }", "{ span.a = 1", "{ } | | count()", "span.a = 1"):
        assert errors(grammar(bad)), bad


@pytest.mark.parametrize("asked", TEMPO, ids=str)
def test_traces_are_asked_for_by_attributes_of_their_hops(asked: Asked) -> None:
    """Where a query names a hop, its attributes are that hop's; where it names none, some hop's."""
    query = parse(filled(asked))
    named = re.findall(r'name = "([^"]+)"', asked.text)
    hops = [hop for hop in HOPS if not named or hop.name in named]
    assert len(hops) >= max(1, len(named)), f"{named} are no hops"
    known = {"job", "error", *(name for hop in hops for name in hop.attributes)}
    for field in query.fields():
        if field.scope in ("span", "any"):
            assert field.name in known, f"{field} is set by none of {[hop.name for hop in hops]}"
        if field.scope == "resource":
            assert field.name in RESOURCE_TAGS


@pytest.mark.parametrize("q", [q for q, _ in CASES if q], ids=str)
def test_what_the_local_store_answers_is_traceql(q: str, grammar: Any) -> None:
    """The subset is one: nothing that only this parser would take."""
    assert not errors(grammar(q)), q


def test_what_is_no_traceql_is_refused_here_too(grammar: Any) -> None:
    wrong = [q for q, _ in REFUSED if len(q) < 200 and errors(grammar(q))]
    assert len(wrong) >= 3
    for q in wrong:
        with pytest.raises(BadQuery):
            parse(q)

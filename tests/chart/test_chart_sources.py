"""Grafana's data sources as the chart provisions them: what compose's are, under names that meet no other chart's."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from chart_tools import CHART, ROOT
from rendered import Manifest, named, render

from syncline.gateway.tempo import router as tempo_routes

PROMETHEUS = ("monitoring.datasources.prometheus.url=http://prometheus.monitoring:9090",)
TEMPO = ("monitoring.datasources.tempo.url=http://tempo.monitoring:3200",)
GATEWAY = ("monitoring.datasources.gateway.enabled=true",)
ALL = (*PROMETHEUS, *TEMPO, *GATEWAY)
COMPOSE = yaml.safe_load((ROOT / "compose" / "grafana" / "datasources.yaml").read_text())


def config_map(*sets: str) -> Manifest:
    return named(render(sets=sets), "ConfigMap", "-datasources")


def provisioned(*sets: str) -> dict[str, Any]:
    """Uid -> data source, of the one file that the sidecar puts into Grafana's provisioning folder."""
    ((name, text),) = config_map(*sets)["data"].items()
    assert name.endswith(".yaml"), "the sidecar and Grafana look at names"
    file = yaml.safe_load(text)
    assert set(file) == {"apiVersion", "datasources"}
    assert file["apiVersion"] == COMPOSE["apiVersion"]
    return {source["uid"]: source for source in file["datasources"]}


def test_what_is_not_named_is_not_provisioned() -> None:
    assert not [m for m in render() if m["metadata"]["name"].endswith("-datasources")]
    for sets, uids in (
        (PROMETHEUS, {"syncline-prometheus"}),
        (TEMPO, {"syncline-tempo"}),
        (GATEWAY, {"syncline"}),
        (ALL, {"syncline-prometheus", "syncline-tempo", "syncline"}),
    ):
        assert set(provisioned(*sets)) == uids


def test_the_sidecar_finds_it() -> None:
    found = config_map(*ALL, "monitoring.datasources.annotations.folder=rl")
    assert found["metadata"]["labels"]["grafana_datasource"] == "1"
    assert found["metadata"]["annotations"] == {"folder": "rl"}


def test_they_are_what_composes_are() -> None:
    """Field for field; addresses, names and the scrape interval apart."""
    theirs = {source["uid"].removeprefix("syncline-"): source for source in COMPOSE["datasources"]}
    ours = {uid.removeprefix("syncline-"): source for uid, source in provisioned(*ALL).items()}
    assert set(ours) == set(theirs)
    for uid, source in ours.items():
        wanted = {key: value for key, value in theirs[uid].items() if key != "isDefault"}
        own = {"name", "uid", "url"}
        assert {k: v for k, v in source.items() if k not in own | {"jsonData"}} == {
            k: v for k, v in wanted.items() if k not in own | {"jsonData"}
        }
        assert source["jsonData"] | {"timeInterval": None} == wanted["jsonData"] | {"timeInterval": None}


def test_a_grafana_that_has_sources_takes_them() -> None:
    """It does not start with two defaults, and a uid is taken once: `prometheus` is another chart's already."""
    sources = provisioned(*ALL).values()
    assert not [source for source in sources if source.get("isDefault")]
    for key in ("uid", "name"):
        values = [source[key] for source in sources]
        assert len(set(values)) == len(values)
        assert all("syncline" in value for value in values)


def test_every_dashboard_finds_its_sources() -> None:
    """By a variable of its type, which takes any source, or by a uid that is there."""
    sources = provisioned(*ALL)
    types = {source["type"] for source in sources.values()}
    boards = sorted((CHART / "dashboards").glob("*.json"))
    assert len(boards) >= 6
    for path in boards:
        board = json.loads(path.read_text())
        variables = {
            one["name"]: one["query"] for one in board["templating"]["list"] if one["type"] == "datasource"
        }
        asked = set(datasources(board))
        assert asked, path.name
        for uid, kind in asked:
            variable = re.fullmatch(r"\$\{(\w+)\}", uid)
            if variable is None:
                assert uid in sources or uid.startswith(("-- ", "grafana")), f"{path.name}: {uid}"
            else:
                assert variables[variable[1]] == kind, path.name
                assert kind in types, f"{path.name}: {kind}"


def datasources(node: Any) -> list[tuple[str, str]]:
    """Uid and type of every data source that a dashboard names."""
    if isinstance(node, list):
        return [pair for part in node for pair in datasources(part)]
    if not isinstance(node, dict):
        return []
    own = node.get("datasource")
    found = [(own["uid"], own.get("type", ""))] if isinstance(own, dict) and "uid" in own else []
    return found + [pair for part in node.values() for pair in datasources(part)]


@pytest.mark.parametrize(
    ("sets", "scheme", "skip"), [((), "http", None), (("gateway.tls.secretName=own",), "https", True)]
)
def test_the_gateways_own_spans_are_asked_where_it_is(sets: tuple[str, ...], scheme: str, skip: Any) -> None:
    source = provisioned(*GATEWAY, *sets, "gateway.service.port=8443")["syncline"]
    url = urlsplit(source["url"])
    service = named(render(sets=sets), "Service", "-gateway")["metadata"]["name"]
    assert (url.scheme, url.hostname, url.port) == (scheme, f"{service}.rl", 8443)
    assert tempo_routes.prefix.startswith(url.path)
    assert source["jsonData"].get("tlsSkipVerify") is skip


def test_a_token_is_named_and_not_written() -> None:
    source = provisioned(*GATEWAY, "monitoring.datasources.gateway.tokenVariable=RL_TOKEN")["syncline"]
    assert source["jsonData"]["httpHeaderName1"] == "Authorization"
    assert source["secureJsonData"] == {"httpHeaderValue1": "Bearer ${RL_TOKEN}"}

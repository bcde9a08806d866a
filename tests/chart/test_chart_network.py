"""Who reaches whom under the chart's NetworkPolicies, worked out as a network plugin would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rendered import Manifest, named, render, templates

from syncline.scheduler.launch.kubernetes.plan import read
from syncline.scheduler.launch.kubernetes.template import labels

Labels = dict[str, str]
STRANGER = {"app": "stranger"}
PLAN = read(named(render(), "ConfigMap", "-launcher")["data"]["launcher.yaml"])
JOB = labels(PLAN, "j0123456789", "rollout", "j0123456789-rollout")
COLLECTOR = ("otel.collector.enabled=true", "otel.collector.exportTo=http://tempo:4318")


def _selects(selector: Any, pod: Labels) -> bool:
    asked = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in asked), "another operator has come: teach it here"
    named = all(pod.get(one["key"]) in one["values"] for one in asked)
    return named and selector.get("matchLabels", {}).items() <= pod.items()


def _lets(rules: Sequence[Any], side: str, other: Labels | None, port: int) -> bool:
    """Whether one rule names this port and this peer. `other` None: somebody outside, whom only an open rule names."""
    for rule in rules:
        ports = [one["port"] for one in rule.get("ports", ())]
        peers = rule.get(side)
        known = peers is None or (
            other is not None
            and any("podSelector" in peer and _selects(peer["podSelector"], other) for peer in peers)
        )
        if known and (not ports or port in ports):
            return True
    return False


def reaches(release: list[Manifest], source: Labels | None, target: Labels | None, port: int) -> bool:
    """A connection passes if no policy holds its source back and none keeps it from its target. None: the outside."""
    policies = [m["spec"] for m in release if m["kind"] == "NetworkPolicy"]
    leaving = [
        p
        for p in policies
        if source is not None and "Egress" in p["policyTypes"] and _selects(p["podSelector"], source)
    ]
    coming = [
        p
        for p in policies
        if target is not None and "Ingress" in p["policyTypes"] and _selects(p["podSelector"], target)
    ]
    out = not leaving or any(_lets(p["egress"], "to", target, port) for p in leaving)
    return out and (not coming or any(_lets(p["ingress"], "from", source, port) for p in coming))


def pods(release: list[Manifest]) -> dict[str, Labels | None]:
    found: dict[str, Labels | None] = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: template["metadata"]["labels"]
        for _, template in templates(release)
    }
    return found | {"job": JOB, "stranger": STRANGER, "outside": None}


ALLOWED = {
    ("stranger", "gateway", 8080),
    ("outside", "gateway", 8080),
    ("test", "gateway", 8080),
    ("gateway", "redis", 6379),
    ("scheduler", "redis", 6379),
    ("errands", "redis", 6379),
    ("job", "redis", 6379),
    ("gateway", "otel", 4318),
    ("scheduler", "otel", 4318),
    ("errands", "otel", 4318),
    ("job", "otel", 4318),
    ("scheduler", "gateway", 4318),
    ("errands", "gateway", 4318),
    ("job", "gateway", 4318),
    ("otel", "gateway", 8080),
    ("job", "job", 8081),
    ("job", "job", 29500),
    ("scheduler", "job", 8081),
    ("scheduler", "outside", 443),
    ("scheduler", "outside", 6443),
    ("gateway", "outside", 53),
    ("scheduler", "outside", 53),
    ("errands", "outside", 53),
    ("job", "outside", 53),
    ("otel", "outside", 4318),
    ("otel", "outside", 443),
    ("otel", "outside", 6443),
    ("otel", "outside", 53),
}
PORTS = {
    "gateway": (8080, 8081, 4318),
    "scheduler": (8081,),
    "errands": (8081,),
    "redis": (6379,),
    "otel": (4318,),
    "job": (8081, 29500),
    "outside": (53, 443, 4318, 6443),
}


def test_the_whole_matrix() -> None:
    """Every pair of the release, a job's pod, a stranger in the namespace, the outside: what is not named is shut."""
    release = render(sets=COLLECTOR)
    who = pods(release)
    free = (
        "stranger",
        "outside",
        "test",
    )  # no policy of ours holds them back; what they do outside is not ours
    found = {
        (source, target, port)
        for source in who
        for target, ports in PORTS.items()
        for port in ports
        if not (source in free and target == "outside")
        and not (source == "outside" and target == "outside")
        and reaches(release, who[source], who[target], port)
    }
    assert found == ALLOWED


def test_a_judge_that_is_named_can_be_asked() -> None:
    sets = ("networkPolicy.egress.to[0].ports[0].port=8443",)
    who = pods(render())
    for name in ("errands", "job", "gateway"):
        assert not reaches(render(), who[name], None, 8443)
        assert reaches(render(sets=sets), who[name], None, 8443)
    assert not reaches(render(sets=sets), who["redis"], None, 8443)


def test_a_named_ingress_shuts_out_strangers() -> None:
    sets = ("networkPolicy.gatewayFrom[0].podSelector.matchLabels.app=ingress",)
    release = render(sets=sets)
    who = pods(release)
    assert reaches(release, {"app": "ingress"}, who["gateway"], 8080)
    assert reaches(release, who["test"], who["gateway"], 8080)
    assert not reaches(release, STRANGER, who["gateway"], 8080)
    assert not reaches(release, None, who["gateway"], 8080)


@pytest.mark.parametrize(
    ("endpoint", "port"), [("http://tempo:4318", 4318), ("https://otlp.example.org", 443)]
)
def test_spans_reach_an_endpoint_of_ones_own(endpoint: str, port: int) -> None:
    release = render(sets=(f"otel.endpoint={endpoint}",))
    assert reaches(release, JOB, None, port)
    assert not reaches(render(), JOB, None, port)


def test_names_are_asked_where_they_are_answered() -> None:
    """A policy sees the port of the pod that answers, which on some clusters is not the Service's 53."""
    release = render(sets=("networkPolicy.dns.ports={5353,8053}",))
    for name, pod in pods(release).items():
        if name in ("gateway", "scheduler", "errands", "job"):
            assert [port for port in (53, 5353, 8053) if reaches(release, pod, None, port)] == [5353, 8053], (
                name
            )
    rules = named(release, "NetworkPolicy", "-job")["spec"]["egress"][0]["ports"]
    assert [(rule["port"], rule["protocol"]) for rule in rules] == [
        (5353, "UDP"),
        (5353, "TCP"),
        (8053, "UDP"),
        (8053, "TCP"),
    ]


def test_an_external_redis_is_reached_on_its_port() -> None:
    sets = ("redis.enabled=false", "redis.external.existingSecret=r", "redis.external.port=6380")
    assert reaches(render(sets=sets), JOB, None, 6380)
    assert not reaches(render(), JOB, None, 6380)


def test_without_policies_all_is_open() -> None:
    release = render(sets=("networkPolicy.enabled=false",))
    assert reaches(release, STRANGER, pods(release)["redis"], 6379)

"""Spans of all pods go to the gateway, as the chart says it to each: by the settings that they really read."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from chart_tools import CHART
from rendered import PROFILES, Manifest, named, refusal, render

from syncline.runtime.settings import Settings
from syncline.scheduler.launch.kubernetes.plan import read
from syncline.scheduler.launch.kubernetes.template import environment
from syncline.scheduler.launch.launcher import Process

OFF = ("gateway.traces.enabled=false",)
VOLUME = ("gateway.traces.storage.enabled=true",)
WHERE = "http://rel-syncline-traces:4318"
KEYS = {"SYNCLINE_REDIS_URL": "redis://r", "SYNCLINE_TRACES_KEY": "k" * 40, "SYNCLINE_TOKEN": "t"}
KEYS |= {"SYNCLINE_METRICS_TOKEN": "m", "SYNCLINE_HOST": "10.0.0.1", "SYNCLINE_HEALTH_HOST": "10.0.0.1"}


def settings(variables: list[Manifest]) -> Settings:
    """What a process reads there; `KEYS` stands for Secrets and addresses."""
    found = {one["name"]: one["value"] for one in variables if "value" in one}
    taken = {one["name"] for one in variables if "valueFrom" in one}
    return Settings.read(found | {name: value for name, value in KEYS.items() if name in taken})


def service(release: list[Manifest], name: str) -> list[Manifest]:
    (container,) = named(release, "Deployment", f"-{name}")["spec"]["template"]["spec"]["containers"]
    variables: list[Manifest] = container["env"]
    return variables


def pod_of_a_job(release: list[Manifest]) -> list[Manifest]:
    """By the launcher that makes it."""
    plan = read(named(release, "ConfigMap", "-launcher")["data"]["launcher.yaml"])
    worker = Process(name="j1/w0", argv=("python",), env={"SYNCLINE_JOB": "j1"}, log=Path("/log"))
    return environment(plan, [worker], 8081)


def key_of(variables: list[Manifest]) -> dict[str, str]:
    (secret,) = (
        one["valueFrom"]["secretKeyRef"] for one in variables if one["name"] == "SYNCLINE_TRACES_KEY"
    )
    return dict(secret)


@pytest.mark.parametrize("profile", PROFILES)
def test_each_pod_sends_its_spans_to_the_gateway_and_keeps_none(profile: str) -> None:
    release = render(profile)
    keeps = settings(service(release, "gateway"))
    assert keeps.traces_port == 4318
    assert keeps.traces_written is not None
    assert not keeps.traces_written.is_relative_to("/runs")  # that volume is shared
    assert keeps.traces_sent is None
    for variables in (service(release, "scheduler"), service(release, "errands"), pod_of_a_job(release)):
        sends = settings(variables)
        assert sends.traces_sent == (WHERE, KEYS["SYNCLINE_TRACES_KEY"])
        assert sends.traces_written is None
        assert key_of(variables) == key_of(service(release, "gateway"))


def test_the_address_and_the_key_are_there() -> None:
    release = render()
    port = named(release, "Service", "-traces")["spec"]["ports"][0]
    (container,) = named(release, "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"]
    listens = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert (port["port"], listens[port["targetPort"]]) == (4318, 4318)
    pods = named(release, "Deployment", "-gateway")["spec"]["template"]["metadata"]["labels"]
    assert named(release, "Service", "-traces")["spec"]["selector"].items() <= pods.items()
    assert (
        "type" not in named(release, "Service", "-traces")["spec"]
    )  # within the cluster, whatever the gateway's is
    secret = named(release, "Secret", "-traces")
    assert key_of(service(release, "gateway")) == {"name": secret["metadata"]["name"], "key": "key"}
    key = base64.b64decode(secret["data"]["key"]).decode()
    assert len(key) == 40
    rest = json.dumps([m for m in release if m != secret])
    assert key not in rest
    assert secret["data"]["key"] not in rest
    text = (CHART / "templates" / "traces.yaml").read_text()
    assert text.count('lookup "v1" "Secret"') == text.count("randAlphaNum") == 1


def test_a_key_of_ones_own() -> None:
    release = render(sets=("gateway.traces.existingSecret=own",))
    assert not [m for m in release if m["kind"] == "Secret" and m["metadata"]["name"].endswith("-traces")]
    for variables in (service(release, "gateway"), service(release, "errands"), pod_of_a_job(release)):
        assert key_of(variables) == {"name": "own", "key": "key"}


def test_a_collector_besides() -> None:
    release = render(sets=("otel.endpoint=http://tempo:4318",))
    for variables in (service(release, "errands"), pod_of_a_job(release)):
        both = settings(variables)
        assert (both.otlp, both.traces_sent) == ("http://tempo:4318", (WHERE, KEYS["SYNCLINE_TRACES_KEY"]))
    assert settings(service(release, "gateway")).otlp == "http://tempo:4318"


def test_without_it_each_pod_keeps_its_own() -> None:
    release = render(sets=OFF)
    assert not [m for m in release if m["metadata"]["name"].endswith("-traces")]
    for variables in (*(service(release, name) for name in ("gateway", "errands")), pod_of_a_job(release)):
        own = settings(variables)
        assert (str(own.traces_written), own.traces_sent, own.traces_port) == (
            "/cache/traces.sqlite",
            None,
            None,
        )
    assert "4318" not in json.dumps([m["spec"] for m in release if m["kind"] == "NetworkPolicy"])


def test_a_volume_is_the_gateways_alone_and_outlives_its_pod() -> None:
    release = render(sets=VOLUME)
    claim = named(release, "PersistentVolumeClaim", "-traces")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    mark = json.dumps({"claimName": claim["metadata"]["name"]})
    users = [m["metadata"]["name"] for m in release if mark in json.dumps(m.get("spec", {}))]
    assert users == ["rel-syncline-gateway"]
    gateway = named(release, "Deployment", "-gateway")
    assert gateway["spec"]["strategy"] == {"type": "Recreate"}  # two pods cannot have it
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    kept = settings(service(release, "gateway")).traces
    assert kept.parent.as_posix() == mounted["traces"]
    assert named(render(), "Deployment", "-gateway")["spec"]["strategy"]["type"] == "RollingUpdate"


def test_bounds_are_handed_on_as_whole_numbers() -> None:
    kept = settings(
        service(render(sets=("gateway.traces.mib=2000000", "gateway.traces.days=1000000")), "gateway")
    )
    assert (kept.traces_days, kept.traces_mib) == (1000000, 2000000)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ("gateway: {traces: {key: secret}}", ("traces", "key")),
        ("gateway: {traces: {mib: 0.5}}", ("mib",)),
        ("gateway: {traces: {days: -1}}", ("days",)),
        ("gateway: {traces: {storage: {size: much}}}", ("size",)),
        ("jobs: {env: {SYNCLINE_TRACES_KEY: x}}", ("SYNCLINE_TRACES_KEY",)),
        ("jobs: {env: {SYNCLINE_TRACES_TO: x}}", ("SYNCLINE_TRACES_TO",)),
    ],
)
def test_values_that_cannot_be(values: str, names: tuple[str, ...]) -> None:
    said = refusal(values=values)
    assert all(name in said for name in names), said

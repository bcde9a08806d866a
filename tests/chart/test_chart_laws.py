"""What holds for every object of a release: probes, limits, least rights, hidden secrets, names that fit."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import yaml
from chart_tools import CHART, ROOT
from rendered import (
    MONITORING,
    PROFILES,
    Manifest,
    containers,
    named,
    redis_options,
    render,
    templates,
)

from syncline.runtime.settings import Settings
from syncline.scheduler.launch.kubernetes.plan import read
from syncline.scheduler.launch.kubernetes.template import labels

ALL_ON = (
    "otel.collector.enabled=true",
    "otel.collector.exportTo=http://tempo:4318",
    "errands.autoscaling.enabled=true",
    "gateway.tls.secretName=own-tls",
    "monitoring.datasources.prometheus.url=http://prometheus:9090",
    "monitoring.datasources.tempo.url=http://tempo:3200",
    "monitoring.datasources.gateway.enabled=true",
)
LONG = "r" * 53  # the longest name that helm takes
DNS = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")


@pytest.fixture(params=[*PROFILES, "all on"])
def release(request: pytest.FixtureRequest) -> list[Manifest]:
    return render("values", ALL_ON) if request.param == "all on" else render(request.param)


def test_all_that_runs_is_bounded_and_least(release: list[Manifest]) -> None:
    running = list(templates(release))
    assert len(running) >= 5
    for name, template in running:
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] > 0, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in containers(template):
            where = f"{name}/{container['name']}"
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, where
            assert security["allowPrivilegeEscalation"] is False, where
            assert security["capabilities"] == {"drop": ["ALL"]}, where
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), where
            assert "memory" in container["resources"]["limits"], where
            assert container["image"].rpartition(":")[2] not in ("", "latest"), where


def test_walls_for_user_code_can_be_permitted() -> None:
    sets = ("errands.seccomp.type=Localhost", "errands.seccomp.localhostProfile=syncline.json")
    (container,) = named(render(sets=sets), "Deployment", "-errands")["spec"]["template"]["spec"][
        "containers"
    ]
    profile = {"type": "Localhost", "localhostProfile": "syncline.json"}
    assert container["securityContext"]["seccompProfile"] == profile
    (container,) = named(render(), "Deployment", "-errands")["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_what_serves_has_probes_that_differ(release: list[Manifest]) -> None:
    """Alive and able to work are two questions, and a start has a budget of its own."""
    for manifest in release:
        if manifest["kind"] not in ("Deployment", "StatefulSet"):
            continue
        for container in manifest["spec"]["template"]["spec"]["containers"]:
            where = f"{manifest['metadata']['name']}/{container['name']}"
            ports = {port["name"] for port in container["ports"]}
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container[kind]
                asked = probe.get("httpGet") or probe.get("tcpSocket") or {"port": None}
                assert asked["port"] in {*ports, None}, f"{where} {kind}"
            start = container["startupProbe"]
            assert start["periodSeconds"] * start["failureThreshold"] >= 60, where
            if container["name"] != "otel":  # which has but one page
                assert container["livenessProbe"] != container["readinessProbe"], where


def test_only_the_scheduler_may_ask_the_cluster(release: list[Manifest]) -> None:
    for name, template in templates(release):
        mounts = template["spec"].get("automountServiceAccountToken")
        assert mounts is name.endswith("-scheduler"), name
    assert not [m for m in release if m["kind"].startswith("ClusterRole")]
    rules = named(release, "Role", "-scheduler")["rules"]
    assert not [rule for rule in rules if "*" in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])]
    reach = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert ("statefulsets", "patch") in reach
    assert ("pods", "create") not in reach
    assert not [
        resource for resource, _ in reach if resource in ("secrets", "roles", "rolebindings", "pods/exec")
    ]


def secrets(release: Sequence[Manifest]) -> list[str]:
    """What the Secrets of a release hold that nobody else may."""
    found = []
    for manifest in release:
        if manifest["kind"] == "Secret":
            data = {key: base64.b64decode(value).decode() for key, value in manifest["data"].items()}
            found += [data[key] for key in ("password", "token") if key in data]
    return found


def test_no_secret_outside_a_secret(release: list[Manifest]) -> None:
    hidden = secrets(release)
    assert [len(secret) for secret in hidden] == [40, 40, 40]
    assert len(set(hidden)) == 3
    rest = json.dumps([m for m in release if m["kind"] != "Secret"])
    for secret in hidden:
        assert secret not in rest
        assert base64.b64encode(secret.encode()).decode() not in rest


def test_no_value_can_hold_a_secret() -> None:
    """`helm get values` prints values: there is none for a password or a token, only names of Secrets."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["gateway"]["token"] == {"existingSecret": "", "key": "token"}
    assert values["gateway"]["metrics"] == {"existingSecret": "", "key": "token"}
    assert values["redis"]["auth"] == {"existingSecret": ""}
    leaves = re.findall(
        r'"(\w*(?:password|token|secret|credential)\w*)": \{\s*"type": "string"', _schema(), re.I
    )
    # tokenVariable: the name of a variable of Grafana's
    assert set(leaves) == {"existingSecret", "secretName", "headersSecret", "secret", "tokenVariable"}


def _schema() -> str:
    return (CHART / "values.schema.json").read_text()


def test_secrets_are_looked_up_before_they_are_made() -> None:
    """Offline nothing can be looked up; that an upgrade keeps them is shown on a real cluster (tests/cluster)."""
    text = (CHART / "templates" / "secrets.yaml").read_text()
    assert text.count('lookup "v1" "Secret"') == text.count("randAlphaNum") == 3


def test_the_password_reaches_redis_and_its_users() -> None:
    release = render()
    data = {
        key: base64.b64decode(value).decode()
        for key, value in named(release, "Secret", "-redis")["data"].items()
    }
    host = named(release, "Service", "-redis")["metadata"]["name"]
    assert data["url"] == f"redis://:{data['password']}@{host}:6379/0"
    assert data["auth.conf"] == f"requirepass {data['password']}\n"
    assert Settings.read({"SYNCLINE_REDIS_URL": data["url"]}).redis_url == data["url"]
    config = named(release, "ConfigMap", "-redis")["data"]["redis.conf"].splitlines()
    assert {"appendonly yes", "appendfsync everysec"} <= set(config)
    assert {f"{option} {value}" for option, value in redis_options().items()} <= set(config)


@pytest.mark.parametrize("release_name", [LONG, "rl", "syncline"])
def test_names_fit(release_name: str) -> None:
    found = render("values-gpu-disjoint", ALL_ON[2:], release=release_name)
    named_twice = [(m["kind"], m["metadata"]["name"]) for m in found]
    assert len(named_twice) == len(set(named_twice))
    for manifest in found:
        name = manifest["metadata"]["name"]
        # a StatefulSet's pods and revisions, a Deployment's pods add to theirs
        assert len(name) <= (52 if manifest["kind"] in ("Deployment", "StatefulSet") else 63), name
        assert DNS.match(name), name
        marks = dict(manifest["metadata"]["labels"])
        for _, template in templates([manifest]):
            marks |= template["metadata"]["labels"]
        assert [value for value in marks.values() if len(value) > 63] == []


def test_ports_name_their_protocol(release: list[Manifest]) -> None:
    """Helm 4 applies on the server's side, where an old server knows no default for a key of a list."""

    def ports(node: Any) -> Iterator[Manifest]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "ports" and isinstance(value, list):
                    yield from value
                yield from ports(value)
        elif isinstance(node, list):
            for one in node:
                yield from ports(one)

    found = list(ports(release))
    assert len(found) > 10
    assert [port for port in found if "protocol" not in port] == []


def test_two_long_names_do_not_meet() -> None:
    first, second = (named(render(release="r" * 52 + end), "Deployment", "-gateway") for end in "ab")
    assert first["metadata"]["name"] != second["metadata"]["name"]


def test_settings_are_known() -> None:
    """Every variable of the pods is one that the program reads, or that the contract with the launcher names."""
    text = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    known = (ROOT / "services" / "syncline" / "runtime" / "settings.py").read_text()
    known += (ROOT / "docs" / "decisions" / "0017-kubernetes.md").read_text()
    used = set(re.findall(r"name: (SYNCLINE_[A-Z_]+|OTEL_[A-Z_]+)", text))
    own = {"SYNCLINE_URL", "SYNCLINE_JOB_FILE"}  # of the test's own script
    assert {"SYNCLINE_REDIS_URL", "SYNCLINE_TOKEN", "SYNCLINE_HEALTH_HOST"} <= used
    assert [name for name in sorted(used - own) if not re.search(rf"\b{name}\b", known)] == []


def test_policies_select_what_they_name(release: list[Manifest]) -> None:
    """Each policy's and budget's selector finds pods of the release, or says that the scheduler makes them."""
    marks = [template["metadata"]["labels"] for _, template in templates(release)]
    policies = [m for m in release if m["kind"] in ("NetworkPolicy", "PodDisruptionBudget", "Service")]
    assert len(policies) > 8
    for policy in policies:
        spec = policy["spec"]
        wanted = spec.get("podSelector", spec.get("selector"))
        wanted = wanted.get("matchLabels", wanted)
        made = wanted.get("app.kubernetes.io/managed-by") == "syncline-scheduler"
        assert made or any(wanted.items() <= have.items() for have in marks), policy["metadata"]["name"]


def test_the_budget_of_jobs_finds_the_schedulers_pods() -> None:
    """By the labels that the launcher really gives."""
    release = render()
    plan = read(named(release, "ConfigMap", "-launcher")["data"]["launcher.yaml"])
    wanted = named(release, "PodDisruptionBudget", "-jobs")["spec"]["selector"]["matchLabels"]
    for role in ("rollout", "trainer", "sync", "colocated"):
        assert wanted.items() <= labels(plan, "j0123456789", role, "pool").items()


def test_every_pod_is_behind_a_policy(release: list[Manifest]) -> None:
    """All but the test's own pod, which serves nothing."""
    behind = [m["spec"]["podSelector"]["matchLabels"] for m in release if m["kind"] == "NetworkPolicy"]
    for name, template in templates(release):
        if not name.startswith("Pod/"):
            assert any(wanted.items() <= template["metadata"]["labels"].items() for wanted in behind), name


def test_monitoring_is_left_out_where_its_kinds_are_not_known() -> None:
    kinds = {m["kind"] for m in render()}
    assert {kind.rpartition("/")[2] for kind in MONITORING} <= kinds
    off = {
        m["kind"]
        for m in render(sets=("monitoring.serviceMonitor.enabled=false", "monitoring.rules.enabled=false"))
    }
    assert not {"ServiceMonitor", "PrometheusRule"} & off


def test_dashboards_are_config_maps() -> None:
    boards = sorted(path.name for path in (CHART / "dashboards").glob("*.json"))
    found = [m for m in render() if m["metadata"]["labels"].get("grafana_dashboard") == "1"]
    assert sorted(name for m in found for name in m["data"]) == boards
    for manifest in found:
        for name, text in manifest["data"].items():
            assert json.loads(text) == json.loads((CHART / "dashboards" / name).read_text())
            assert len(text) < 900_000, "a ConfigMap holds at most 1 MiB"

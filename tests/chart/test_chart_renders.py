"""The chart lints, and all it renders is valid on Kubernetes 1.30 to 1.37, under helm 3 and helm 4."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
from chart_tools import CHART, HELM, helm, ran
from rendered import NEWEST, PROFILES, Manifest, named, render

RELEASES = tuple(f"1.{minor}" for minor in range(30, 38))
FOREIGN = ("monitoring.coreos.com/v1",)  # kinds of operators, whose schemas are not Kubernetes' own
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "all on": (
        "ingress.enabled=true",
        "ingress.host=rl.example.org",
        "ingress.className=nginx",
        "ingress.tls.secretName=tls",
        "ingress.auth.url=https://auth.example.org/check",
        "gateway.tls.secretName=own-tls",
        "gateway.tls.serverName=rl.example.org",
        "gateway.priorityClassName=high",
        "errands.priorityClassName=high",
        "redis.priorityClassName=high",
        "otel.collector.priorityClassName=high",
        "otel.collector.nodeSelector.pool=services",
        "networkPolicy.dns.ports={53,5353}",
        "monitoring.datasources.prometheus.url=http://prometheus:9090",
        "monitoring.datasources.tempo.url=http://tempo:3200",
        "monitoring.datasources.gateway.enabled=true",
        "gateway.tokens.existingSecret=tenants",
        "otel.endpoint=",
        "otel.collector.enabled=true",
        "otel.collector.exportTo=http://tempo:4318",
        "otel.collector.headersSecret=tempo",
        "errands.autoscaling.enabled=true",
        "image.pullSecrets[0]=pull",
        "jobs.priorityClass=high",
        "redis.maxmemory=4gb",
        "networkPolicy.gatewayFrom[0].namespaceSelector.matchLabels.name=ingress",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring",
        "networkPolicy.egress.to[0].ports[0].port=443",
    ),
    "external": (
        "redis.enabled=false",
        "redis.external.existingSecret=redis",
        "storage.runs.existingClaim=nfs",
    ),
}


@pytest.mark.parametrize("version", HELM)
@pytest.mark.parametrize("profile", PROFILES)
def test_lint_is_strict(profile: str, version: str) -> None:
    code, said = ran(helm(version), "lint", "--strict", CHART, "-f", CHART / f"{profile}.yaml")
    assert code == 0, said


@pytest.fixture(autouse=True, scope="module")
def schemas_are_read_once() -> Iterator[None]:
    """The library reads a file of 1.5 MB for each object."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents)
    )
    yield
    patch.undo()


def check(manifests: list[Manifest], kube: str) -> int:
    """Validate against the strict schemas of a release: unknown fields are errors. Returns how many."""
    checked = 0
    for manifest in manifests:
        if manifest["apiVersion"] in FOREIGN:
            continue
        kubernetes_validate.validate(manifest, kube, strict=True)
        checked += 1
    return checked


@pytest.mark.parametrize("kube", RELEASES)
@pytest.mark.parametrize("profile", PROFILES)
def test_valid_on_each_release(profile: str, kube: str) -> None:
    assert check(render(profile, kube=f"{kube}.0"), kube) > 20


@pytest.mark.parametrize("kube", [RELEASES[0], RELEASES[-1]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_valid_with_everything_on(variant: str, kube: str) -> None:
    assert check(render("values", VARIANTS[variant], kube=f"{kube}.0"), kube) > 15


def test_both_helms_render_the_same() -> None:
    """But for the secrets, which are made anew where no cluster is asked."""

    def plain(version: str) -> list[Manifest]:
        found = render("values-gpu-disjoint", version=version)
        return sorted(
            (m for m in found if m["kind"] != "Secret"), key=lambda m: (m["kind"], m["metadata"]["name"])
        )

    assert plain("3.17.2") == plain(NEWEST)


def test_kinds_that_an_old_cluster_lacks_give_way() -> None:
    """1.20 has neither policy/v1 nor autoscaling/v2; what a cluster has is what decides, not its version's name."""
    found = render("values-gpu-disjoint")
    assert {m["apiVersion"] for m in found if m["kind"] == "PodDisruptionBudget"} == {"policy/v1"}
    for name, modern, old in (
        ("pdb", "policy/v1", "policy/v1beta1"),
        ("errands", "autoscaling/v2", "autoscaling/v2beta2"),
    ):
        text = (CHART / "templates" / f"{name}.yaml").read_text()
        assert f'ternary "{modern}" "{old}"' in text
        assert f'Has "{modern}"' in text


def test_an_unknown_field_is_found() -> None:
    """The judge judges: a misspelt field and a wrong type fail."""
    good = named(render(), "Deployment", "-gateway")
    for path, value in ((("spec", "replicaz"), 1), (("spec", "replicas"), "one")):
        bad = copy.deepcopy(good)
        bad[path[0]][path[1]] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(bad, "1.34", strict=True)


@pytest.mark.parametrize("version", HELM)
def test_a_broken_chart_fails(tmp_path: Path, version: str) -> None:
    """Lint has teeth: a copy with a template that does not close, and one with values that its schema does not know."""
    code, said = ran("cp", "-r", CHART, tmp_path / "open")
    assert code == 0, said
    (tmp_path / "open" / "templates" / "pdb.yaml").write_text("{{- if .Values.redis.enabled }}\n")
    code, said = ran(helm(version), "lint", "--strict", tmp_path / "open")
    assert code != 0
    assert "unexpected EOF" in said
    ran("cp", "-r", CHART, tmp_path / "unknown")
    with (tmp_path / "unknown" / "values.yaml").open("a") as file:
        file.write("gatewya: {}\n")
    code, said = ran(helm(version), "lint", "--strict", tmp_path / "unknown")
    assert code != 0
    assert "gatewya" in said

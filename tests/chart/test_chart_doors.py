"""The gateway's secrets as the chart mounts them: token store, certificate, Prometheus' token; who speaks https."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from chart_tools import CHART, helm, ran
from rendered import NEWEST, Manifest, named, render

from syncline.runtime.settings import Settings

TLS = ("gateway.tls.secretName=own-tls",)
TENANTS = ("gateway.tokens.existingSecret=tenants",)


def gateway(release: list[Manifest]) -> tuple[Manifest, Manifest]:
    """Pod and container."""
    pod = named(release, "Deployment", "-gateway")["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def environment(container: Manifest) -> dict[str, str]:
    """The container's variables; what a Secret or a field holds is named after it."""
    return {one["name"]: one.get("value", f"from-{one['name']}") for one in container["env"]} | {
        "SYNCLINE_REDIS_URL": "redis://r"
    }


def files(pod: Manifest, container: Manifest) -> dict[PurePosixPath, tuple[str, str]]:
    """File in the container -> the Secret and the key that it is."""
    secrets = {one["name"]: one["secret"] for one in pod["volumes"] if "secret" in one}
    return {
        PurePosixPath(mount["mountPath"]) / item["path"]: (secrets[mount["name"]]["secretName"], item["key"])
        for mount in container["volumeMounts"]
        if mount["name"] in secrets
        for item in secrets[mount["name"]]["items"]
    }


def test_what_the_gateway_reads_is_what_is_mounted() -> None:
    """By the settings that it really reads: each file is a key of the Secret that the values name."""
    pod, container = gateway(render(sets=(*TLS, *TENANTS)))
    settings = Settings.read(environment(container))
    assert (settings.tls_cert, settings.tls_key) == (
        Path("/etc/syncline-tls/tls.crt"),
        Path("/etc/syncline-tls/tls.key"),
    )
    assert files(pod, container) == {
        PurePosixPath(settings.token_store): ("tenants", "tokens.json"),
        PurePosixPath("/etc/syncline-tls/tls.crt"): ("own-tls", "tls.crt"),
        PurePosixPath("/etc/syncline-tls/tls.key"): ("own-tls", "tls.key"),
    }
    assert all(m["readOnly"] for m in container["volumeMounts"] if m["mountPath"].startswith("/etc/"))
    pod, container = gateway(render())
    settings = Settings.read(environment(container))
    assert (settings.tls_cert, settings.token_store) == (None, Path("/runs/tokens.json"))
    assert files(pod, container) == {}


@pytest.mark.parametrize(("sets", "scheme"), [((), "http"), (TLS, "https")])
def test_all_who_ask_the_gateway_speak_as_it_does(sets: tuple[str, ...], scheme: str) -> None:
    release = render(sets=(*sets, "ingress.enabled=true", "ingress.host=a.b", "ingress.tls.secretName=t"))
    _, container = gateway(release)
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[kind]["httpGet"]["scheme"] == scheme.upper()
    (port,) = named(release, "Service", "-gateway")["spec"]["ports"]
    assert (port["name"], port["appProtocol"], port["targetPort"]) == (scheme, scheme, "http")
    (endpoint,) = named(release, "ServiceMonitor", "-gateway")["spec"]["endpoints"]
    assert (endpoint["port"], endpoint.get("scheme", "http")) == (scheme, scheme)
    ingress = named(release, "Ingress", "rel-syncline")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["port"]["name"] == scheme
    protocol = ingress["metadata"]["annotations"].get("nginx.ingress.kubernetes.io/backend-protocol", "HTTP")
    assert protocol == scheme.upper()
    (test,) = named(release, "Pod", "-test")["spec"]["containers"]
    assert environment(test)["SYNCLINE_URL"] == f"{scheme}://rel-syncline-gateway:80"


@pytest.mark.parametrize(("sets", "scheme"), [((), "http"), (TLS, "https")])
def test_the_notes_speak_as_the_gateway_does(tmp_path: Path, sets: tuple[str, ...], scheme: str) -> None:
    """NOTES.txt through the engine, as a template beside the others: `helm template` does not print it."""
    ran("cp", "-r", CHART, tmp_path / "chart")
    notes = tmp_path / "chart" / "templates" / "NOTES.txt"
    text = notes.read_text()
    notes.unlink()
    wrapped = (
        f'{{{{- define "notes" -}}}}\n{text}\n{{{{- end -}}}}\nnotes: {{{{ include "notes" . | quote }}}}\n'
    )
    (notes.parent / "shown.yaml").write_text(wrapped)
    said = shown(tmp_path / "chart", sets)
    (curl,) = [line for line in said.splitlines() if line.strip().startswith("curl")]
    assert f"{scheme}://127.0.0.1:8080/v1/jobs" in curl
    assert ("--insecure" in curl) == (scheme == "https")
    other = {"http": "https", "https": "http"}[scheme]
    assert f"{other}://" not in said
    (scraped,) = [line for line in said.splitlines() if "rel-syncline-metrics" in line]
    assert "nothing else" in scraped


def shown(chart: Path, sets: tuple[str, ...]) -> str:
    more = [part for given in sets for part in ("--set", given)]
    code, said = ran(helm(NEWEST), "template", "rel", chart, "--show-only", "templates/shown.yaml", *more)
    assert code == 0, said
    found: str = yaml.safe_load(said)["notes"]
    return found


def scrape(release: list[Manifest]) -> Any:
    (endpoint,) = named(release, "ServiceMonitor", "-gateway")["spec"]["endpoints"]
    return endpoint


def reference(container: Manifest, name: str) -> dict[str, str]:
    (found,) = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if one["name"] == name]
    return dict(found)


@pytest.mark.parametrize(
    ("sets", "secret", "key"),
    [
        ((), "rel-syncline-metrics", "token"),
        (("gateway.metrics.key=scrape",), "rel-syncline-metrics", "scrape"),
        (("gateway.metrics.existingSecret=own", "gateway.metrics.key=bearer"), "own", "bearer"),
    ],
)
def test_prometheus_shows_a_token_of_its_own(sets: tuple[str, ...], secret: str, key: str) -> None:
    """Monitor, gateway and `helm test` name one key of one Secret; no monitor names the operator's."""
    release = render(sets=sets)
    wanted = {"name": secret, "key": key}
    assert scrape(release)["authorization"] == {"type": "Bearer", "credentials": wanted}
    assert reference(gateway(release)[1], "SYNCLINE_METRICS_TOKEN") == wanted
    assert (
        reference(named(release, "Pod", "-test")["spec"]["containers"][0], "SYNCLINE_METRICS_TOKEN") == wanted
    )
    made = {m["metadata"]["name"]: m["data"] for m in release if m["kind"] == "Secret"}
    assert (secret in made) == (secret != "own")
    assert secret == "own" or set(made[secret]) == {key}
    settings = Settings.read(environment(gateway(release)[1]))
    assert settings.metrics_token != settings.token


def test_prometheus_verifies_a_name_that_it_is_told() -> None:
    assert "tlsConfig" not in scrape(render())
    assert scrape(render(sets=TLS))["tlsConfig"] == {"insecureSkipVerify": True}
    told = scrape(render(sets=(*TLS, "gateway.tls.serverName=rl.example.org")))
    assert told["tlsConfig"] == {
        "serverName": "rl.example.org",
        "ca": {"secret": {"name": "own-tls", "key": "ca.crt"}},
    }


def references(node: Any) -> Iterator[tuple[str, str]]:
    """Every Secret and key that something of a release names."""
    if isinstance(node, dict):
        found = node.get("secretKeyRef")
        if found:
            yield found["name"], found["key"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_secret_that_is_named_is_made() -> None:
    """With no values at all a release needs nothing that it does not bring."""
    release = render()
    made = {(m["metadata"]["name"], key) for m in release if m["kind"] == "Secret" for key in m["data"]}
    named_there = set(references([m for m in release if m["kind"] != "Secret"]))
    assert len(named_there) >= 4
    assert named_there <= made
    pods = [m for m in release if m["kind"] in ("Deployment", "StatefulSet")]
    volumes = [v["secret"] for m in pods for v in m["spec"]["template"]["spec"]["volumes"] if "secret" in v]
    assert {(v["secretName"], item["key"]) for v in volumes for item in v["items"]} <= made

"""Values that cannot be right are refused before anything is installed, with the key in the message."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from chart_tools import CHART, HELM, ROOT
from rendered import PROFILES, refusal, render

from syncline.contract.job import JobSpec

REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    # values as YAML, and what the message must hold
    "unknown key": ("gatewai: {}", ("gatewai",)),
    "unknown key in a part": ("gateway: {replicas: 3}", ("gateway", "replicas")),
    "unknown role": ("jobs: {roles: {rolout: {gpus: 8}}}", ("roles", "rolout")),
    "unknown key of an image": ("redis: {image: {tags: '8'}}", ("redis", "image", "tags")),
    "half a GPU": ("jobs: {roles: {rollout: {gpus: 0.5}}}", ("roles", "rollout", "gpus", "integer")),
    "a GPU as text": ("jobs: {roles: {trainer: {gpus: '1'}}}", ("gpus",)),
    "GPUs below zero": ("jobs: {roles: {trainer: {gpus: -1}}}", ("gpus",)),
    "half a GPU as a resource": (
        "jobs: {roles: {rollout: {resources: {limits: {amd.com/vf: 0.5}}}}}",
        ("limits", "amd.com", "integer"),
    ),
    "GPUs in two places": (
        "jobs: {roles: {rollout: {gpus: 1, resources: {limits: {nvidia.com/gpu: 2}}}}}",
        ("rollout", "limits"),
    ),
    "GPUs of another maker in two places": (
        "jobs: {roles: {rollout: {gpuResource: habana.ai/gaudi, resources: {limits: {habana.ai/gaudi: 2}}}}}",
        ("jobs.roles.rollout.resources.limits", "habana.ai/gaudi"),
    ),
    "a variable twice": (
        "jobs: {env: {HF_TOKEN: a}, secretEnv: {HF_TOKEN: {secret: hf, key: token}}}",
        ("jobs.secretEnv.HF_TOKEN", "jobs.env"),
    ),
    "no time to leave": ("jobs: {grace: 5}", ("grace",)),
    "memory without a unit": ("gateway: {resources: {limits: {memory: 4}}}", ("memory",)),
    "a resource that does not exist": ("errands: {resources: {limits: {gpu: 1}}}", ("gpu",)),
    "root": ("security: {uid: 0}", ("uid",)),
    "no errands": ("errands: {replicas: 0}", ("replicas",)),
    "a volume of one node for nobody": ("storage: {runs: {accessMode: ReadOnlyMany}}", ("accessMode",)),
    "a path that leaves the volume": ("storage: {runs: {subPath: ../other}}", ("subPath",)),
    "an evicting fsync": ("redis: {appendfsync: 'no'}", ("appendfsync",)),
    "memory that is no size": ("redis: {maxmemory: lots}", ("maxmemory",)),
    "a password as a value": ("redis: {auth: {password: secret}}", ("password",)),
    "a token as a value": ("gateway: {token: {value: secret}}", ("value",)),
    "a variable that syncline sets": ("jobs: {env: {SYNCLINE_JOB: j1}}", ("SYNCLINE_JOB",)),
    "a variable that is no name": ("jobs: {env: {'a b': c}}", ("a b",)),
    "a secret without key": ("jobs: {secretEnv: {HF_TOKEN: {secret: hf}}}", ("key",)),
    "a digest that is none": ("gateway: {image: {digest: latest}}", ("digest",)),
    "an address without scheme": ("otel: {endpoint: 'tempo:4318'}", ("endpoint",)),
    "a service type": ("gateway: {service: {type: Public}}", ("type",)),
    "a port": ("gateway: {service: {port: 70000}}", ("port",)),
    "a peer that names nobody": ("networkPolicy: {gatewayFrom: [{}]}", ("gatewayFrom",)),
    "a misspelt toleration": ("scheduler: {tolerations: [{keys: gpu}]}", ("keys",)),
    "a long name": (f"fullnameOverride: {'x' * 39}", ("fullnameOverride",)),
    "no Redis at all": ("redis: {enabled: false}", ("redis.external.existingSecret",)),
    "an ingress in the clear": (
        "ingress: {enabled: true, host: rl.example.org}",
        ("ingress.tls.secretName", "in the clear"),
    ),
    "an ingress without a name": (
        "ingress: {enabled: true, tls: {secretName: tls}}",
        ("ingress.host",),
    ),
    "a metrics token as a value": ("gateway: {metrics: {token: secret}}", ("metrics", "token")),
    "a key of the metrics token that is none": ("gateway: {metrics: {key: a b}}", ("metrics", "key")),
    "a token store as a value": ("gateway: {tokens: {tokens.json: '{}'}}", ("tokens.json",)),
    "a certificate as a value": ("gateway: {tls: {crt: PEM}}", ("tls", "crt")),
    "a server's name with a port": ("gateway: {tls: {serverName: 'a:443'}}", ("serverName",)),
    "a priority class that is no name": ("redis: {priorityClassName: High!}", ("priorityClassName",)),
    "more memory than the container has": (
        "redis: {maxmemory: 9gb, resources: {limits: {memory: 8Gi}}}",
        ("redis.maxmemory: 9gb", "redis.resources.limits.memory, 8Gi"),
    ),
    "more memory than the container has, in other units": (
        "redis: {maxmemory: 8gb, resources: {limits: {memory: 8G}}}",
        ("redis.maxmemory: 8gb", "8G"),
    ),
    "a server without a bound": (
        "redis: {resources: {limits: {memory: null}}}",
        ("redis.resources.limits.memory", "redis.maxmemory"),
    ),
    "no port for names": ("networkPolicy: {dns: {ports: []}}", ("dns", "ports")),
    "a port for names twice": ("networkPolicy: {dns: {ports: [53, 53]}}", ("dns", "ports")),
    "a port for names that is none": ("networkPolicy: {dns: {ports: [0]}}", ("dns", "ports")),
    "one port for names": ("networkPolicy: {dns: {port: 53}}", ("dns", "port")),
    "no time to start": ("jobs: {workerStart: 0}", ("workerStart",)),
    "a start in words": ("jobs: {workerStart: 30m}", ("workerStart", "integer")),
    "a scrape token for jobs": ("jobs: {env: {SYNCLINE_METRICS_TOKEN: x}}", ("SYNCLINE_METRICS_TOKEN",)),
    "a data source nobody knows": ("monitoring: {datasources: {loki: {url: 'http://l'}}}", ("loki",)),
    "a data source without scheme": (
        "monitoring: {datasources: {prometheus: {url: 'prometheus:9090'}}}",
        ("prometheus", "url"),
    ),
    "a token for Grafana as a value": (
        "monitoring: {datasources: {gateway: {enabled: true, token: secret}}}",
        ("gateway", "token"),
    ),
    "a variable of Grafana's that is none": (
        "monitoring: {datasources: {gateway: {enabled: true, tokenVariable: 'a b'}}}",
        ("tokenVariable",),
    ),
    "half a GPU in a colocated pod": (
        "jobs: {roles: {colocated: {gpus: 0.5}}}",
        ("colocated", "gpus", "integer"),
    ),
    "a profile that nobody would use": (
        "errands: {seccomp: {localhostProfile: syncline.json}}",
        ("errands.seccomp.localhostProfile", "RuntimeDefault"),
    ),
    "a Redis that nobody would use": (
        "redis: {external: {existingSecret: mine}}",
        ("redis.external.existingSecret", "redis.enabled=false"),
    ),
    "a name for no certificate": (
        "gateway: {tls: {serverName: rl.example.org}}",
        ("gateway.tls.serverName", "gateway.tls.secretName"),
    ),
    "a way in without a door": (
        "ingress: {enabled: true, host: a.b, tls: {secretName: t}, auth: {signIn: 'https://a/start'}}",
        ("ingress.auth.signIn", "ingress.auth.url"),
    ),
    "an address in place of a host": (
        "ingress: {enabled: true, host: 'https://rl.example.org', tls: {secretName: t}}",
        ("ingress", "host"),
    ),
    "two ways for spans": (
        "otel: {endpoint: 'http://a:4318', collector: {enabled: true, exportTo: 'http://b:4318'}}",
        ("otel.endpoint", "not both"),
    ),
    "a collector that leads nowhere": ("otel: {collector: {enabled: true}}", ("otel.collector.exportTo",)),
    "a profile without a name": (
        "errands: {seccomp: {type: Localhost}}",
        ("errands.seccomp.localhostProfile",),
    ),
    "no account": ("serviceAccount: {create: false}", ("serviceAccount.name",)),
    "an autoscaler upside down": (
        "errands: {autoscaling: {enabled: true, minReplicas: 9, maxReplicas: 3}}",
        ("errands.autoscaling.minReplicas", "9"),
    ),
}


@pytest.mark.parametrize("version", HELM)
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, version: str) -> None:
    values, wanted = REFUSED[case]
    said = refusal(values=values, version=version)
    for part in wanted:
        assert part in said, said


def test_set_cannot_give_half_a_gpu() -> None:
    assert "gpus" in refusal(["jobs.roles.colocated.gpus=0.5"])


def schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text())


VERBATIM = ("/affinity/properties/", "/properties/pod", "/properties/global")
"""Objects that are handed to Kubernetes as they are, which then checks them."""


def objects(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every subschema that describes an object."""
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield path, node
        for key, value in node.items():
            yield from objects(value, f"{path}/{key}")
    elif isinstance(node, list):
        for place, value in enumerate(node):
            yield from objects(value, f"{path}/{place}")


def test_every_object_of_the_schema_is_closed() -> None:
    """An object takes its own keys alone, or names that users give, each with a type; or it is a named verbatim one."""
    jsonschema.Draft7Validator.check_schema(schema())
    found = list(objects(schema()))
    assert len(found) > 40
    loose = [
        path
        for path, node in found
        if node.get("additionalProperties") is not False
        and not isinstance(node.get("additionalProperties"), dict)
        and not any(part in path for part in VERBATIM)
    ]
    assert loose == []


def test_every_value_has_its_place_in_the_schema() -> None:
    """values.yaml names all keys: schema and file have the same ones, so that no key is there in secret."""

    def keys(node: Any, path: str = "") -> Iterator[str]:
        ref = node.get("$ref")
        node = schema()["definitions"][ref.rsplit("/", 1)[1]] if ref else node
        for key, value in node.get("properties", {}).items():
            yield f"{path}/{key}"
            yield from keys(value, f"{path}/{key}")

    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def has(path: str) -> bool:
        node = values
        for key in path.strip("/").split("/"):
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True

    deep = ("/resources/", "/affinity/", "/global")  # what a container may ask for needs no default
    missing = [path for path in keys(schema()) if not has(path) and not any(part in path for part in deep)]
    assert missing == []


def test_the_quickstart_of_the_values_is_the_example() -> None:
    """`helm test` with values-cpu.yaml runs examples/quickstart.toml."""
    job = yaml.safe_load((CHART / "values-cpu.yaml").read_text())["tests"]["job"]
    assert job.strip() == (ROOT / "examples" / "quickstart.toml").read_text().strip()
    held = next(m for m in render("values-cpu") if m["kind"] == "ConfigMap" and "job.toml" in m["data"])
    assert tomllib.loads(held["data"]["job.toml"]) == tomllib.loads(job)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_profiles_hold_no_unknown_key(profile: str) -> None:
    """The schema refuses on its own, without helm's defaults under it."""
    jsonschema.Draft7Validator(schema()).validate(yaml.safe_load((CHART / f"{profile}.yaml").read_text()))


def test_the_notes_first_job_is_one() -> None:
    """The third of the three commands submits a spec that the gateway takes."""
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    commands = [line.strip() for line in notes.splitlines() if line.startswith("  ")]
    assert [line.split()[0] for line in commands] == ["kubectl", "export", "curl"]
    body = re.search(r"-d '(\{.*\})'", commands[2])
    assert body is not None
    assert JobSpec.model_validate_json(body[1]).model.name == "tiny-moe"
    assert (ROOT / "examples" / "models" / "tiny-moe").is_dir()

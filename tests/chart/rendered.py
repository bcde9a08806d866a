"""What the chart renders to, as Python values."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from chart_tools import CHART, helm, ran

from syncline.scheduler.stack import redis_process

Manifest = dict[str, Any]
NEWEST = "4.3.1"
PROFILES = ("values", "values-cpu", "values-gpu-colocated", "values-gpu-disjoint")
MONITORING = ("monitoring.coreos.com/v1/ServiceMonitor", "monitoring.coreos.com/v1/PrometheusRule")


@cache
def _text(profile: str, sets: tuple[str, ...], release: str, version: str, kube: str) -> str:
    more = [part for given in sets for part in ("--set", given)]
    kinds = [part for kind in MONITORING for part in ("--api-versions", kind)]
    code, said = ran(
        helm(version), "template", release, CHART, "-f", CHART / f"{profile}.yaml", "-n", "rl",
        "--kube-version", kube, *kinds, *more,
    )  # fmt: skip
    assert code == 0, said
    return said


def redis_options() -> dict[str, str]:
    """The options that the laptop's Redis has for what the product needs of any Redis, not for where it runs."""
    argv = redis_process(Path("runs"), Path("socket")).argv[1:]
    given = dict(zip(argv[::2], argv[1::2], strict=True))
    return {
        option: given[f"--{option}"] for option in ("maxmemory-policy", "hz", "hash-max-listpack-entries")
    }


def render(
    profile: str = "values",
    sets: Sequence[str] = (),
    release: str = "rel",
    version: str = NEWEST,
    kube: str = "1.34.0",
) -> list[Manifest]:
    """All objects of a release, hooks included."""
    text = _text(profile, tuple(sets), release, version, kube)
    return [copy.deepcopy(one) for one in yaml.load_all(text, yaml.CSafeLoader) if one]


def refusal(sets: Sequence[str] = (), values: str = "", version: str = NEWEST) -> str:
    """What helm says when it refuses these values. Fails if it does not."""
    more = [part for given in sets for part in ("--set", given)]
    given = ["--values", "-"] if values else []
    code, said = ran(helm(version), "template", "rel", CHART, *given, *more, stdin=values)
    assert code != 0, f"{sets} {values} was taken"
    return said


def named(manifests: Sequence[Manifest], kind: str, ends: str) -> Manifest:
    """The one object of a kind whose name has this end."""
    found = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(ends)]
    assert len(found) == 1, f"{len(found)} of {kind} ...{ends}"
    return found[0]


def templates(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and pod template (or pod) of everything that runs."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield name, manifest["spec"]["template"]
        elif manifest["kind"] == "Pod":
            yield name, manifest


def containers(template: Manifest) -> list[Manifest]:
    """Containers and init containers."""
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]

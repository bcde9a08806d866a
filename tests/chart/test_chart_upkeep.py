"""What a cluster's admin does to a release: drains nodes, bounds memory, waits for large models, rolls secrets over."""

from __future__ import annotations

import pytest
from rendered import PROFILES, Manifest, named, render, templates

from syncline.runtime.settings import Settings

UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "M": 10**6, "G": 10**9, "T": 10**12}


def size(text: str) -> int:
    number, unit = text.rstrip("MGTi"), text.lstrip("0123456789.")
    return int(float(number) * UNITS[unit])


def bound(release: list[Manifest]) -> str:
    """What redis.conf says of memory."""
    lines = named(release, "ConfigMap", "-redis")["data"]["redis.conf"].splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith("maxmemory ")]
    assert "maxmemory-policy noeviction" in lines
    return str(found)


@pytest.mark.parametrize("profile", PROFILES)
def test_redis_refuses_before_its_container_is_killed(profile: str) -> None:
    release = render(profile)
    (container,) = named(release, "StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]
    assert int(bound(release)) == size(container["resources"]["limits"]["memory"]) * 3 // 4


@pytest.mark.parametrize(
    ("limit", "said", "wanted"),
    [
        ("8Gi", "", 6 * 2**30),
        ("1.5Gi", "", 1152 * 2**20),
        ("500M", "", 375 * 10**6),
        ("2T", "", 15 * 10**11),
        ("3Ti", "", 9 * 2**38),
        ("1001M", "", 750_750_000),
    ],
)
def test_a_bound_comes_from_every_unit(limit: str, said: str, wanted: int) -> None:
    assert bound(render(sets=(f"redis.resources.limits.memory={limit}",))) == str(wanted)


@pytest.mark.parametrize("said", ["7gb", "8gb", "8192mb", "512mb", "8388608kb"])
def test_a_bound_that_is_said_wins(said: str) -> None:
    assert bound(render(sets=(f"redis.maxmemory={said}", "redis.resources.limits.memory=8Gi"))) == said


def test_what_does_not_serve_holds_no_drain() -> None:
    """Budgets let a node be emptied of pods that load or crash; a cluster before 1.27 does not know the field."""
    found = {
        kube: [m for m in render(kube=f"{kube}.0") if m["kind"] == "PodDisruptionBudget"]
        for kube in ("1.26", "1.27", "1.34")
    }
    for kube, budgets in found.items():
        assert len(budgets) == 5
        policies = {budget["spec"].get("unhealthyPodEvictionPolicy") for budget in budgets}
        assert policies == {None if kube == "1.26" else "AlwaysAllow"}, kube
        assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets)


def test_each_service_can_be_placed() -> None:
    """Selectors, tolerations and a priority reach all that runs, the pod of `helm test` included."""
    parts = ("gateway", "scheduler", "errands", "redis", "otel.collector")
    sets = [f"{part}.priorityClassName=p{place}" for place, part in enumerate(parts)]
    sets += [f"{part}.nodeSelector.pool=n{place}" for place, part in enumerate(parts)]
    sets += [f"{part}.tolerations[0].key=t{place}" for place, part in enumerate(parts)]
    sets += ["otel.collector.enabled=true", "otel.collector.exportTo=http://tempo:4318"]
    placed = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: (
            template["spec"]["priorityClassName"],
            template["spec"]["nodeSelector"]["pool"],
            template["spec"]["tolerations"][0]["key"],
        )
        for _, template in templates(render(sets=sets))
    }
    names = (*(part.partition(".")[0] for part in parts), "test")
    assert placed == {name: (f"p{i % 5}", f"n{i % 5}", f"t{i % 5}") for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("profile", "seconds"),
    [("values", 180), ("values-cpu", 180), ("values-gpu-colocated", 3600), ("values-gpu-disjoint", 2700)],
)
def test_a_large_model_has_the_time_that_it_takes(profile: str, seconds: int) -> None:
    """The gateway gives the budget to specs that name none; probes and the scheduler's patience follow the spec."""
    (container,) = named(render(profile), "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert Settings.read({"SYNCLINE_WORKER_START": given["SYNCLINE_WORKER_START"]}).worker_start == seconds

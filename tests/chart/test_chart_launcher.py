"""launcher.yaml as the chart writes it: what docs/decisions/0017-kubernetes.md says, and what the scheduler reads."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from rendered import PROFILES, Manifest, named, render

from syncline.scheduler.launch.kubernetes.plan import read


def launcher(release: list[Manifest]) -> Any:
    return yaml.safe_load(named(release, "ConfigMap", "-launcher")["data"]["launcher.yaml"])


KEYS = {
    "release", "namespace", "lease", "owner", "serviceAccount", "images", "pullPolicy", "pullSecrets", "env",
    "secretEnv", "runs", "models", "cache", "shm", "grace", "user", "priorityClass", "queue", "claimTemplate", "roles",
}  # fmt: skip
ROLE_KEYS = {
    "resources", "gpus", "gpuResource", "nodeSelector", "tolerations", "affinity", "topologySpread", "labels",
    "annotations", "pod",
}  # fmt: skip


@pytest.mark.parametrize("profile", PROFILES)
def test_it_says_what_was_agreed(profile: str) -> None:
    said = launcher(render(profile))
    assert set(said) == KEYS
    assert set(said["images"]) == set(said["roles"]) == {"rollout", "trainer", "sync", "colocated"}
    for role in said["roles"].values():
        assert set(role) == ROLE_KEYS
        assert isinstance(role["gpus"], int)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_scheduler_reads_it(profile: str) -> None:
    """With the reader that the scheduler has, which refuses what it does not know."""
    text = named(render(profile), "ConfigMap", "-launcher")["data"]["launcher.yaml"]
    plan = read(text)
    assert plan.release == "rel"
    assert plan.secret_env["SYNCLINE_REDIS_URL"].secret == "rel-syncline-redis"
    assert plan.roles.colocated.gpus == (0 if profile in ("values", "values-cpu") else 8)
    with pytest.raises(ValueError, match=r"launcher\.yaml"):
        read(text + "colour: red\n")


def test_its_names_are_those_of_the_release() -> None:
    release = render()
    said = launcher(release)
    objects = {(m["kind"], m["metadata"]["name"]) for m in release}
    assert said["release"] == "rel"
    assert said["namespace"] == "rl"
    assert ("ServiceAccount", said["serviceAccount"]) in objects
    assert ("ConfigMap", said["owner"]) in objects
    assert ("PersistentVolumeClaim", said["runs"]["claim"]) in objects
    assert ("PersistentVolumeClaim", said["models"]["claim"]) in objects
    secret = said["secretEnv"]["SYNCLINE_REDIS_URL"]
    assert ("Secret", secret["secret"]) in objects
    assert secret["key"] in named(release, "Secret", "-redis")["data"]
    lease = [rule for rule in named(release, "Role", "-scheduler")["rules"] if "resourceNames" in rule]
    assert lease[0]["resourceNames"] == [said["lease"]]


def test_colocated_pods_have_rollouts_image_by_default() -> None:
    said = launcher(render())
    assert said["images"]["colocated"] == said["images"]["rollout"]
    said = launcher(render(sets=("jobs.images.colocated.tag=gpu",)))
    assert said["images"]["colocated"].endswith("/rollout:gpu")


def test_whole_numbers_stay_whole() -> None:
    """Helm reads numbers as floats; sizes and counts must not come out as 8e+00."""
    said = launcher(render("values-gpu-colocated"))
    assert said["roles"]["colocated"]["gpus"] == 8
    assert isinstance(said["grace"], int)
    assert isinstance(said["user"], int)


def test_kueue_brings_the_right_to_make_jobs() -> None:
    def may(profile: str) -> set[str]:
        rules = named(render(profile), "Role", "-scheduler")["rules"]
        return {resource for rule in rules for resource in rule["resources"]}

    assert "jobs" in may("values-gpu-colocated")
    assert "jobs" not in may("values-gpu-disjoint")


def test_an_upgrade_of_the_contract_restarts_the_scheduler() -> None:
    def mark(*sets: str) -> str:
        template = named(render(sets=sets), "Deployment", "-scheduler")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/launcher"])

    assert mark() == mark()
    assert mark() != mark("jobs.grace=90")

"""The chart on a real API server, by helm 3 and helm 4: what can be shown only where there is something to look up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chart_tools import CHART, HELM, helm
from control import ControlPlane, Rest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NAMESPACE = "chart"
CPU = ("-f", str(CHART / "values-cpu.yaml"))
# another profile on the volumes of the first: a claim's size and access cannot be changed
GPU = ("-f", str(CHART / "values-gpu-disjoint.yaml"), "-f", str(CHART / "values-cpu.yaml"))
Helm = Callable[..., str]


@pytest.fixture(params=list(HELM))
def release(
    request: pytest.FixtureRequest, plane: ControlPlane, tmp_path: Path
) -> Iterator[tuple[Helm, str]]:
    """`helm(arguments) -> output` of one version, and a release name of its own."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    plane.admin.make("/api/v1/namespaces", body)
    config = plane.admin.kubeconfig(tmp_path / "config", NAMESPACE)
    environment = {**os.environ, "KUBECONFIG": str(config), "HOME": str(tmp_path)}
    name = f"by-helm-{request.param[0]}"

    def run(*arguments: str) -> str:
        command = [str(helm(request.param)), *arguments, "-n", NAMESPACE]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{arguments[:2]}: {done.stdout}{done.stderr}"
        return done.stdout

    yield run, name
    run("uninstall", name)


def objects(plane: ControlPlane, group: str, kind: str, name: str) -> list[dict[str, Any]]:
    """Those of the release."""
    label = f"app.kubernetes.io/instance={name}"
    return plane.admin.items(f"/{group}/namespaces/{NAMESPACE}/{kind}", labelSelector=label)


def secrets(plane: ControlPlane, name: str) -> dict[str, Any]:
    return {one["metadata"]["name"]: one["data"] for one in objects(plane, "api/v1", "secrets", name)}


def test_secrets_survive_upgrades_and_rollbacks(plane: ControlPlane, release: tuple[Helm, str]) -> None:
    run, name = release
    run("install", name, str(CHART), *CPU)
    first = secrets(plane, name)
    made = ("metrics", "redis", "token", "traces")
    assert set(first) == {f"{name}-syncline-{one}" for one in made}
    run("upgrade", name, str(CHART), *CPU, "--set", "jobs.grace=90")
    run("upgrade", name, str(CHART), *GPU, "--set", "errands.autoscaling.enabled=true")
    assert secrets(plane, name) == first
    (scaler,) = objects(plane, "apis/autoscaling/v2beta2", "horizontalpodautoscalers", name)
    assert scaler["spec"]["scaleTargetRef"]["name"] == f"{name}-syncline-errands"
    run("rollback", name, "1")
    assert secrets(plane, name) == first
    assert objects(plane, "apis/autoscaling/v2beta2", "horizontalpodautoscalers", name) == []
    values = run("get", "values", name, "--all")
    for data in first.values():
        for secret in data.values():
            assert secret not in values


def test_an_old_cluster_gets_the_kinds_that_it_has(plane: ControlPlane, release: tuple[Helm, str]) -> None:
    run, name = release
    said = run("install", name, str(CHART), *CPU)
    assert len(objects(plane, "apis/policy/v1beta1", "poddisruptionbudgets", name)) == 5
    assert "ServiceMonitor and PrometheusRule are left out" in said
    assert f"svc/{name}-syncline-gateway" in said


def test_the_scheduler_may_do_what_it_must_and_no_more(
    plane: ControlPlane, release: tuple[Helm, str]
) -> None:
    run, name = release
    run("install", name, str(CHART), *CPU)
    scheduler = plane.account(NAMESPACE, f"{name}-syncline-scheduler")
    job = plane.account(NAMESPACE, f"{name}-syncline-job")
    here = f"namespaces/{NAMESPACE}"
    try:
        for path in (f"api/v1/{here}/pods", f"apis/apps/v1/{here}/statefulsets", f"api/v1/{here}/configmaps"):
            assert isinstance(scheduler.items(f"/{path}"), list)
            assert denied(job, path), path
        for path in (
            f"api/v1/{here}/secrets",
            "api/v1/nodes",
            "api/v1/namespaces/default/pods",
            f"apis/batch/v1/{here}/jobs",
        ):
            assert denied(scheduler, path), path
    finally:
        scheduler.close()
        job.close()


def denied(who: Rest, path: str) -> bool:
    """Whether the server says 403."""
    try:
        who.get(f"/{path}")
    except httpx.HTTPStatusError as error:
        return error.response.status_code == 403
    return False


def test_volumes_stay_and_are_taken_up_again(plane: ControlPlane, release: tuple[Helm, str]) -> None:
    """An uninstalled release leaves runs and models; the next one of that name has them."""
    run, name = release

    def claims() -> dict[str, str]:
        found = objects(plane, "api/v1", "persistentvolumeclaims", name)
        return {one["metadata"]["name"]: one["metadata"]["uid"] for one in found}

    run("install", name, str(CHART), *CPU)
    before = claims()
    assert {f"{name}-syncline-runs", f"{name}-syncline-models"} <= set(before)
    run("uninstall", name)
    run("install", name, str(CHART), *CPU)
    assert claims() == before

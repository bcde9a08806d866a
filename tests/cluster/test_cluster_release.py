"""A release of the chart, and a job under it: installed by helm, upgraded and rolled back while the job runs."""

from __future__ import annotations

import json
import os
import subprocess
from urllib.parse import urlencode

import pytest
from chart_tools import CHART, HELM, helm
from guarantees import check
from rig import Rig
from specs import spec
from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

RELEASE = "demo"
FULL = "demo-syncline"
UPDATES = 80


class Release:
    """The chart by one helm, in the rig's namespace, with a Redis and volumes that the rig has."""

    def __init__(self, rig: Rig, version: str) -> None:
        self.rig, self.binary = rig, helm(version)
        rig.full = FULL
        self.config = rig.plane.admin.kubeconfig(rig.folder / "helm.yaml", rig.namespace)
        self.values = rig.folder / "values.yaml"
        claims = {
            name: {"storageClassName": "rig", "accessMode": "ReadWriteMany", "size": "1Gi"}
            for name in ("runs", "models")
        }
        claims["models"] |= {"examples": False}  # type: ignore[dict-item]
        self.values.write_text(
            json.dumps(
                {
                    "redis": {"enabled": False, "external": {"existingSecret": "outside"}},
                    "storage": claims,
                    "jobs": {
                        "grace": 30,
                        "roles": {"rollout": {"gpus": 1}, "trainer": {"gpus": 1}, "colocated": {"gpus": 2}},
                    },
                }
            )
        )
        rig.volume(f"{FULL}-runs", rig.runs)
        rig.volume(f"{FULL}-models", rig.models)
        rig.rest.make(
            rig.at("secrets"), {"metadata": {"name": "outside"}, "stringData": {"url": rig.redis_url}}
        )

    def helm(self, *words: str) -> str:
        env = {**os.environ, "KUBECONFIG": str(self.config), "HOME": str(self.rig.folder)}
        command = [str(self.binary), *words, "-n", self.rig.namespace]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{words[:2]}: {done.stdout}{done.stderr}"
        return done.stdout

    def bring(self, verb: str, *sets: str) -> None:
        """`helm install` or `helm upgrade` with the values of a CPU cluster, and these."""
        files = ("-f", str(CHART / "values-cpu.yaml"), "-f", str(self.values))
        self.helm(verb, RELEASE, str(CHART), *files, *(part for one in sets for part in ("--set", one)))

    def settled(self, image: str) -> None:
        """Until each service has one ready pod, of this image's tag."""

        def done() -> bool:
            pods = self.rig.pods(f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/managed-by=Helm")
            ready = [
                pod["metadata"]["labels"]["app.kubernetes.io/component"]
                for pod in pods
                if any(
                    c["type"] == "Ready" and c["status"] == "True"
                    for c in pod["status"].get("conditions", [])
                )
                and all(c["image"].endswith(f":{image}") for c in pod["spec"]["containers"])
            ]
            return sorted(ready) == ["errands", "gateway", "scheduler"] and len(pods) == 3

        wait_until(done, 180, f"services of {image} are ready", every=0.3)


@pytest.mark.parametrize("version", [list(HELM)[-1]])
def test_a_job_outlives_upgrade_rollback_switches_kills_and_evictions(rig: Rig, version: str) -> None:
    release = Release(rig, version)
    release.bring("install", "image.tag=one")
    release.settled("one")
    rig.token = rig.secret(f"{FULL}-token", "token")
    slow = {"pace": [0.05, 0.05]}  # so that it is still running when helm is through
    wanted = spec(
        schedule={"mode": "colocated", "updates": UPDATES}, limits={"worker_idle": 5.0}, rollout=slow
    )
    job = rig.post("/v1/jobs", wanted)["id"]
    rig.wait(job, 300, "update 2", lambda status: int(status["update"]) >= 2)
    first = images(rig, job)
    assert {image.rpartition(":")[2] for image in first.values()} == {"one"}

    release.bring("upgrade", "image.tag=two", "jobs.env.ADDED=set")
    release.settled("two")
    assert images(rig, job) == first  # the same pods, of the same images: an upgrade moves no running job
    before = int(rig.status(job)["update"])
    rig.switch(job, "disjoint", ["rollout", "sync", "trainer"])
    assert {image.rpartition(":")[2] for image in images(rig, job).values()} == {"one"}
    rig.run(f"{job}-rollout-0").kill()
    rig.evict(rig.run(f"{job}-trainer-0").name)
    rig.wait(job, 300, "updates after the upgrade", lambda status: int(status["update"]) >= before + 3)

    release.helm("rollback", RELEASE, "1")
    release.settled("one")
    rig.switch(job, "colocated", ["shared", "sync"])
    rig.run(f"{FULL}-scheduler").kill()
    rig.wait(job, 400, "the end", lambda status: status["state"] == "succeeded")
    check(rig.runs / job, rig.summary(job), UPDATES, max_lag=1)
    wait_until(lambda: not rig.owned(job), 60, "nothing of the job is left")
    for service in (
        "scheduler",
        "rollout",
        "errands",
        "trainer",
        "sync",
    ):  # since the gateway's pod was last replaced
        query = urlencode({"q": f'{{ resource.service.name = "{service}" && span.job = "{job}" }}'})
        assert rig.get(f"/tempo/api/search?{query}")["traces"], (
            f"no span of {service} has come to the gateway"
        )
    assert [end for end in rig.kubelet.ended if end["killed"]] == []
    release.helm("uninstall", RELEASE)
    wait_until(lambda: not rig.pods(), 120, "no pod is left")


def images(rig: Rig, job: str) -> dict[str, str]:
    """Uid of each of the job's pods -> its image."""
    pods = rig.pods(f"syncline.dev/job={job}")
    return {pod["metadata"]["uid"]: pod["spec"]["containers"][0]["image"] for pod in pods}

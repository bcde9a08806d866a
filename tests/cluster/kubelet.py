"""A kubelet for tests: pods that are bound to its node run as real processes of this machine.

What it keeps of a kubelet's promises: the container's command line and environment (with references to fields, secrets
and ConfigMaps), startup, liveness and readiness probes over real HTTP, restarts with back-off, statuses, SIGTERM to
the first process and SIGKILL to all of the container after the grace, deletion only once everything has ended. What
stands in for a machine's isolation: each pod has its own loopback address, mount paths in arguments and environment
are rewritten to folders of this machine, and names of Services to addresses (`service_addresses.py`). Images are not
run; their names are kept.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from control import Body, Rest
from service_addresses import Services

TICK = 0.1
BACK_OFF = 0.5  # seconds before the first restart of a container, doubled up to the last
LAST_BACK_OFF = 5.0
MARK = "SYNCLINE_TEST_CONTAINER"  # variable by which everything that runs in a container is found
SERVICES = ("gateway", "scheduler", "errands", "rollout", "trainer", "sync")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Kubelet:
    """One node, for the pods of one namespace.

    volumes   PersistentVolumeClaim -> folder
    account   a service account's view of the server
    """

    def __init__(
        self, rest: Rest, namespace: str, folder: Path, volumes: dict[str, Path], account: Any
    ) -> None:
        self.rest, self.namespace, self.folder = rest, namespace, folder
        self.volumes, self.account, self.node = volumes, account, f"node-{namespace}"
        self.pods: dict[str, PodRun] = {}  # by uid
        self.ended: list[
            dict[str, Any]
        ] = []  # of each pod that is gone: name, seconds, whether it had to be killed
        self.services = Services(self)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._address = 1
        self._register()
        self._thread = threading.Thread(target=self._follow, name="kubelet", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        for run in list(self.pods.values()):
            run.abandon()
        self.services.stop()
        self.rest.send("DELETE", f"/api/v1/nodes/{self.node}")

    def run_of(self, pod: str) -> PodRun:
        """The live pod with this name."""
        return next(run for run in self.pods.values() if run.name == pod)

    def next_address(self) -> str:
        with self._lock:
            self._address += 1
            network = 64 + os.getpid() % 128  # two sessions on one machine must not meet
            return f"127.{network}.{self._address // 250}.{self._address % 250 + 1}"

    def _register(self) -> None:
        capacity = {
            "cpu": "64",
            "memory": "512Gi",
            "pods": "110",
            "nvidia.com/gpu": "8",
            "ephemeral-storage": "1Ti",
        }
        labels = {"kubernetes.io/hostname": self.node, "accelerator": "test"}
        self.rest.make("/api/v1/nodes", {"kind": "Node", "metadata": {"name": self.node, "labels": labels}})
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
        self.rest.patch(f"/api/v1/nodes/{self.node}/status", {"status": status})
        self.rest.patch(f"/api/v1/nodes/{self.node}", {"spec": {"taints": None}})

    def _follow(self) -> None:
        """List and look, every tick: a node of this size needs no watch."""
        while not self._stop.wait(TICK * 2):
            try:
                path = f"/api/v1/namespaces/{self.namespace}/pods"
                listed = self.rest.items(path, fieldSelector=f"spec.nodeName={self.node}")
            except httpx.HTTPError:
                continue
            there = {pod["metadata"]["uid"]: pod for pod in listed}
            for uid, pod in there.items():
                if uid not in self.pods:
                    self.pods[uid] = PodRun(self, pod)
                self.pods[uid].pod = pod
            for uid in [uid for uid in self.pods if uid not in there]:
                self.pods.pop(uid).abandon()  # deleted by force

    def last(self, run: PodRun, seconds: float, killed: bool) -> None:
        """The pod has ended: say so, which takes it out of the cluster."""
        self.ended.append({"pod": run.name, "labels": run.labels, "seconds": seconds, "killed": killed})
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": run.uid}}
        try:
            self.rest.send("DELETE", f"/api/v1/namespaces/{run.namespace}/pods/{run.name}", options)
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (404, 409):
                raise


class PodRun:
    """One pod, with a thread of its own."""

    def __init__(self, kubelet: Kubelet, pod: Body) -> None:
        self.kubelet, self.pod = kubelet, pod
        metadata = pod["metadata"]
        self.name, self.uid, self.namespace = metadata["name"], metadata["uid"], metadata["namespace"]
        self.labels: dict[str, str] = metadata.get("labels", {})
        self.address = kubelet.next_address()
        self.folder = kubelet.folder / f"{self.name}-{self.uid[:8]}"
        self.folder.mkdir(parents=True)
        self.started_at = now()
        self._over = threading.Event()
        self._said = ""
        self.containers = [ContainerRun(self, spec) for spec in pod["spec"]["containers"]]
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def kill(self, container: str | None = None) -> int:
        """SIGKILL the first process of a container, as the kernel would: everything in it goes. Its pid."""
        run = next(c for c in self.containers if container in (None, c.name))
        assert run.child is not None
        pid = run.child.pid
        run.kill_all()
        return pid

    def abandon(self) -> None:
        self._over.set()
        for container in self.containers:
            container.kill_all()

    def _run(self) -> None:
        while not self._over.is_set():
            if "deletionTimestamp" in self.pod["metadata"]:
                return self._end()
            for container in self.containers:
                container.turn()
            self.tell()
            self._over.wait(TICK)
        return None

    def _end(self) -> None:
        began, grace = time.monotonic(), float(self.pod["metadata"].get("deletionGracePeriodSeconds") or 0)
        for container in self.containers:
            container.terminate()
        while (
            any(c.alive() for c in self.containers)
            and time.monotonic() - began < grace
            and not self._over.is_set()
        ):
            self._over.wait(TICK / 2)
        killed = any(c.alive() for c in self.containers)
        seconds = time.monotonic() - began
        for container in self.containers:
            container.kill_all()
        self._over.set()
        self.kubelet.last(self, seconds, killed)

    def tell(self) -> None:
        """Write the status if it has changed."""
        ready = all(c.ready for c in self.containers)
        status = {
            "phase": "Running",
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": "127.0.0.1",
            "startTime": self.started_at,
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Initialized", "status": "True"},
                {"type": "ContainersReady", "status": str(ready)},
                {"type": "Ready", "status": str(ready)},
            ],
            "containerStatuses": [c.status() for c in self.containers],
        }
        text = json.dumps(status)
        if text == self._said:
            return
        try:
            self.kubelet.rest.patch(
                f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/status", {"status": status}
            )
            self._said = text
        except httpx.HTTPError:
            pass  # gone, or the server is busy: told again at the next turn

    # ---- what its containers see ---------------------------------------------------------------------------
    def mounts(self, container: Body) -> dict[str, Path]:
        """Mount path -> folder of this machine."""
        volumes = {volume["name"]: volume for volume in self.pod["spec"].get("volumes", [])}
        found: dict[str, Path] = {}
        for mount in container.get("volumeMounts", []):
            if mount["mountPath"] == "/dev/shm":
                continue
            sub_path: str = mount.get("subPath", "")
            found[str(mount["mountPath"])] = self._volume(volumes[mount["name"]]) / sub_path
        return found

    def _volume(self, volume: Body) -> Path:
        if "persistentVolumeClaim" in volume:
            claim: str = volume["persistentVolumeClaim"]["claimName"]
            return self.kubelet.volumes[claim]
        folder = self.folder / "volumes" / str(volume["name"])
        folder.mkdir(parents=True, exist_ok=True)
        for kind, path in (("configMap", "configmaps"), ("secret", "secrets")):
            if kind in volume:
                name = volume[kind].get("name") or volume[kind]["secretName"]
                for key, text in self._data(path, name).items():
                    (folder / key).write_text(text)
        return folder

    def _data(self, path: str, name: str) -> dict[str, str]:
        found = self.kubelet.rest.get(f"/api/v1/namespaces/{self.namespace}/{path}/{name}")
        data: dict[str, str] = found.get("data") or {}
        return {k: base64.b64decode(v).decode() for k, v in data.items()} if path == "secrets" else data

    def environment(self, container: Body) -> dict[str, str]:
        """A container's variables, references resolved."""
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            for kind, path in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
                if kind in source:
                    found |= self._data(path, source[kind]["name"])
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                value = self._value(variable["valueFrom"])
            else:
                value = re.sub(r"\$\((\w+)\)", lambda m: found.get(m[1], m[0]), variable.get("value", ""))
                value = self.kubelet.services.resolved(value)
            if value is not None:
                found[variable["name"]] = (
                    self.address if value == "0.0.0.0" else value
                )  # the pod's own network
        return found

    def _value(self, source: Body) -> str | None:
        if "fieldRef" in source:
            field = source["fieldRef"]["fieldPath"]
            plain = {
                "status.podIP": self.address,
                "status.hostIP": "127.0.0.1",
                "spec.nodeName": self.kubelet.node,
            }
            plain |= {f"metadata.{k}": self.pod["metadata"][k] for k in ("name", "namespace", "uid")}
            indexed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", field)
            return (
                str(self.pod["metadata"].get(indexed[1], {}).get(indexed[2], "")) if indexed else plain[field]
            )
        for kind, path in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
            if kind in source:
                data = self._data(path, source[kind]["name"])
                return (
                    data.get(source[kind]["key"])
                    if source[kind].get("optional")
                    else data[source[kind]["key"]]
                )
        raise ValueError(f"a variable from {source} is not played here")


class ContainerRun:
    """One container of a pod."""

    def __init__(self, pod: PodRun, spec: Body) -> None:
        self.pod, self.spec, self.name = pod, spec, str(spec["name"])
        self.mark = f"{pod.uid}/{self.name}"
        self.child: subprocess.Popen[bytes] | None = None
        self.restarts, self.started, self.ready = -1, False, False
        self._last: Body = {}
        self._due, self._back_off, self._since = 0.0, BACK_OFF, ""
        self._probes: dict[str, list[float]] = {}  # kind -> [due, failures in a row]
        self.liveness_kills = 0

    def turn(self) -> None:
        """Start it if it is due, see whether it has ended, probe it."""
        if self.child is None:
            if time.monotonic() >= self._due:
                self._start()
            return
        code = self.child.poll()
        if code is not None:
            self._bury(code)
        elif not self.started and "startupProbe" in self.spec:
            verdict = self._probe("startupProbe")
            self.started = verdict is True
            if verdict is False:
                self._kill_for("startup")
        else:
            self.started = True
            if "livenessProbe" in self.spec and self._probe("livenessProbe") is False:
                self._kill_for("liveness")
            elif "readinessProbe" in self.spec:
                verdict = self._probe("readinessProbe")
                self.ready = self.ready if verdict is None else verdict
            else:
                self.ready = True

    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def terminate(self) -> None:
        self.ready = False
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)

    def kill_all(self) -> None:
        """SIGKILL to everything in the container."""
        for process in processes_of(self.mark):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self.child is not None:
            self.child.kill()
            self.child.wait()

    def status(self) -> Body:
        state: Body = {
            "waiting": {"reason": "CrashLoopBackOff" if self.restarts >= 0 else "ContainerCreating"}
        }
        if self.child is not None:
            state = {"running": {"startedAt": self._since}}
        found: Body = {"name": self.name, "image": self.spec["image"], "imageID": "", "state": state}
        return found | {
            "ready": self.ready,
            "started": self.started,
            "restartCount": max(0, self.restarts),
            "lastState": self._last,
        }

    def _start(self) -> None:
        mounts = self.pod.mounts(self.spec)
        env = {name: mapped(value, mounts) for name, value in self.pod.environment(self.spec).items()}
        words = [*self.spec.get("command", entry_point(self.spec["image"])), *self.spec.get("args", [])]
        words = [
            mapped(re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), word), mounts) for word in words
        ]
        if words[0] == "python":
            words[0] = sys.executable
        base = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }
        if "PYTHONPATH" in os.environ:  # tests of a copy of the tree
            base["PYTHONPATH"] = os.environ["PYTHONPATH"]
        if self.pod.pod["spec"].get("automountServiceAccountToken", True):
            base |= self._credentials()
        self.restarts += 1
        log = self.pod.folder / f"{self.name}.log"
        with log.open("ab") as out:
            self.child = subprocess.Popen(
                words,
                env={**base, **env},
                cwd=self.pod.folder,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self._since, self.started, self.ready = now(), False, False
        delays = {k: float(self.spec.get(k, {}).get("initialDelaySeconds", 0)) for k in PROBES}
        self._probes = {kind: [time.monotonic() + delay, 0.0] for kind, delay in delays.items()}

    def _credentials(self) -> dict[str, str]:
        name = self.pod.pod["spec"].get("serviceAccountName", "default")
        rest: Rest = self.pod.kubelet.account(self.pod.namespace, name)
        path = rest.kubeconfig(self.pod.folder / "kubeconfig", self.pod.namespace)
        rest.close()
        return {"KUBECONFIG": str(path)}

    def _bury(self, code: int) -> None:
        self.kill_all()
        ended = {"exitCode": code if code >= 0 else 128 - code, "startedAt": self._since, "finishedAt": now()}
        self._last = {"terminated": ended}
        self.child, self.ready, self.started = None, False, False
        self._due = time.monotonic() + self._back_off
        self._back_off = min(LAST_BACK_OFF, 2 * self._back_off)

    def _kill_for(self, why: str) -> None:
        self.liveness_kills += 1
        print(f"{self.pod.name}/{self.name}: killed for its {why} probe", file=sys.stderr)  # noqa: T201
        self.kill_all()

    def _probe(self, kind: str) -> bool | None:
        """True or False once the probe has decided; None: not due, or not yet decided."""
        told, known = self.spec[kind], self._probes[kind]
        if time.monotonic() < known[0]:
            return None
        known[0] = time.monotonic() + float(told.get("periodSeconds", 10))
        good = self._asks(told["httpGet"], float(told.get("timeoutSeconds", 1)))
        known[1] = 0.0 if good else known[1] + 1
        if good:
            return True
        return False if known[1] >= int(told.get("failureThreshold", 3)) else None

    def _asks(self, told: Body, timeout: float) -> bool:
        port = told["port"]
        if isinstance(port, str):
            port = next(p["containerPort"] for p in self.spec["ports"] if p["name"] == port)
        connection = http.client.HTTPConnection(self.pod.address, port, timeout=timeout)
        try:
            connection.request("GET", told["path"])
            answer = connection.getresponse()
            answer.read()
            return 200 <= answer.status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def entry_point(image: str) -> list[str]:
    """What the image of one of our services runs by itself, as its Dockerfile says."""
    name = re.sub(r"[:@].*", "", image.rpartition("/")[2])
    return ["python", "-m", f"syncline.{name}"] if name in SERVICES else []


def mapped(text: str, mounts: dict[str, Path]) -> str:
    """`text` with a mount path at its beginning replaced by the folder that stands for it."""
    for path, folder in sorted(mounts.items(), key=lambda one: -len(one[0])):
        if text == path or text.startswith(path + "/"):
            return str(folder) + text[len(path) :]
    return text


def processes_of(mark: str) -> Iterator[psutil.Process]:
    """Everything that runs in the container with this mark."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue

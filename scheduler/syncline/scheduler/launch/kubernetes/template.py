"""The template of a pod, pure: from processes and the plan to what a kubelet reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from syncline.scheduler.launch.kubernetes.plan import CACHE, HEALTH, MODELS, RUNS, PodPlan, Raw, Role
from syncline.scheduler.launch.launcher import Process
from syncline.scheduler.launch.pod import Played

NAME = "syncline"
MANAGER = "syncline-scheduler"
JOB = "syncline.dev/job"
POOL = "syncline.dev/pool"
LOOK = "syncline.dev/look"  # annotation: digest of the template, so that a pod of an older one is known
PROCESSES = "syncline.dev/processes"  # annotation: container -> names of its processes
KEPT = ("SYNCLINE_JOB", "SYNCLINE_WORKER")
"""Variables of a process that a pod takes over; where everything else lies, the plan says."""
LEAVING = 5  # seconds of the grace that a pod's entry keeps for itself
APART = 100  # ports between two containers of a pod; a container with several processes has one for each


def labels(plan: PodPlan, job: str, component: str, pool: str) -> dict[str, str]:
    """Labels of everything that belongs to a pool of a job."""
    return {
        "app.kubernetes.io/name": NAME,
        "app.kubernetes.io/instance": plan.release,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": MANAGER,
        JOB: job,
        POOL: pool,
    }


def digest(value: Any) -> str:
    """A short digest of a manifest or a part of one."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def template(
    plan: PodPlan, role: str, containers: Mapping[str, Sequence[Process]], shown: dict[str, str], names: Raw
) -> Raw:
    """A pod template. Raises `ValueError` for an override that names what a launcher must find again.

    role         whose part of the plan it gets
    containers   by name, the processes of each; of a pool, those of the first pod
    shown        labels
    names        container -> names of processes, as `PROCESSES` keeps them
    """
    part = plan.roles.of(role)
    spec: Raw = {
        "serviceAccountName": plan.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # the command takes the place of the image's tini: the pod's own first process collects orphans
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": plan.grace,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": plan.user,
            "runAsGroup": plan.user,
            "fsGroup": plan.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            _container(plan, part, name, index, own) for index, (name, own) in enumerate(containers.items())
        ],
        "volumes": _volumes(plan),
        **_where(plan, part, shown),
    }
    if plan.claim_template and role == "colocated":
        spec["resourceClaims"] = [{"name": "devices", "resourceClaimTemplateName": plan.claim_template}]
    annotations = {**part.annotations, PROCESSES: json.dumps(names, sort_keys=True)}
    whole = {"metadata": {"labels": {**part.labels, **shown}, "annotations": annotations}, "spec": spec}
    merged: Raw = merge(whole, part.pod)
    kept = merged["metadata"]
    if (
        any(kept["labels"].get(k) != v for k, v in shown.items())
        or kept["annotations"][PROCESSES] != annotations[PROCESSES]
    ):
        raise ValueError(
            f"launcher.yaml: roles.{role}.pod changes a label or annotation that finds the pod again"
        )
    kept["annotations"][LOOK] = digest(merged)
    return merged


def _where(plan: PodPlan, part: Role, shown: Mapping[str, str]) -> Raw:
    """Where the pod may run. A spread without a selector spreads the pool's own pods."""
    selector = {"labelSelector": {"matchLabels": {JOB: shown[JOB], POOL: shown[POOL]}}}
    given: Raw = {
        "imagePullSecrets": [{"name": name} for name in plan.pull_secrets],
        "priorityClassName": plan.priority_class,
        "nodeSelector": part.node_selector,
        "tolerations": part.tolerations,
        "affinity": part.affinity,
        "topologySpreadConstraints": [{**selector, **spread} for spread in part.topology_spread],
    }
    return {name: value for name, value in given.items() if value}


def _container(plan: PodPlan, part: Role, name: str, index: int, processes: Sequence[Process]) -> Raw:
    port = HEALTH + APART * index
    mounts = [
        {"name": "runs", "mountPath": RUNS} | _sub_path(plan.runs.sub_path),
        {"name": "models", "mountPath": MODELS, "readOnly": True} | _sub_path(plan.models.sub_path),
        {"name": "cache", "mountPath": CACHE},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return {
        "name": name,
        "image": plan.image(name),
        "imagePullPolicy": plan.pull_policy,
        "command": _command(plan, processes),
        "env": environment(plan, processes, port),
        "ports": [{"name": "health" if index == 0 else f"health-{index}", "containerPort": port}],
        "resources": resources(plan, part),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
        **_probed(port, processes),
    }


def _command(plan: PodPlan, processes: Sequence[Process]) -> list[str]:
    """One process is its container's own. Several are kept by the pod's entry, which is told them whole."""
    if len(processes) == 1:
        return list(processes[0].argv)
    played = [
        Played(name=process.name, argv=process.argv, env=_kept(process), start=process.start)
        for process in processes
    ]
    told = msgspec.json.encode(played).decode()
    return ["python", "-m", "syncline.scheduler.launch.pod", str(plan.grace - LEAVING), told]


def _kept(process: Process) -> dict[str, str]:
    return {name: process.env[name] for name in KEPT if name in process.env}


def environment(plan: PodPlan, processes: Sequence[Process], port: int) -> list[Raw]:
    """A container's variables. A pool's worker is named by its pod: `SYNCLINE_REPLICA`."""
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    plain = {
        "HOME": "/tmp",
        "SYNCLINE_RUNS": RUNS,
        "SYNCLINE_MODELS": MODELS,
        "SYNCLINE_CACHE": CACHE,
        "SYNCLINE_TRACES": f"{CACHE}/traces.sqlite",
        "SYNCLINE_HEALTH_PORT": str(port),
        "SYNCLINE_DRAIN": str(plan.grace // 3),
        **plan.env,
    }
    found: dict[str, Raw] = {name: {"value": value} for name, value in plain.items()}
    found |= {"SYNCLINE_HOST": {"valueFrom": address}, "SYNCLINE_HEALTH_HOST": {"valueFrom": address}}
    for name, secret in plan.secret_env.items():
        found[name] = {"valueFrom": {"secretKeyRef": {"name": secret.secret, "key": secret.key}}}
    if len(processes) == 1:
        kept = _kept(processes[0])
        if kept.pop("SYNCLINE_WORKER", None) is not None:
            found["SYNCLINE_REPLICA"] = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        found |= {name: {"value": value} for name, value in kept.items()}
    # a variable may use only those before it: the order is part of the meaning, so it is always the same
    return [{"name": name, **value} for name, value in sorted(found.items())]


def resources(plan: PodPlan, part: Role) -> Raw:
    """Requests and limits, with whole GPUs, or with the claim that the pod's containers share.

    Quantities are text: a server takes no bare numbers in what is applied, though YAML writes them.
    """
    found: Raw = {
        name: {resource: str(quantity) for resource, quantity in part.resources.get(name, {}).items()}
        for name in ("requests", "limits")
    }
    if plan.claim_template and part is plan.roles.colocated:
        found["claims"] = [{"name": "devices"}]
    elif part.gpus:
        found["limits"] = {**found["limits"], part.gpu_resource: str(part.gpus)}
    return {name: value for name, value in found.items() if value}


def _probed(port: int, processes: Sequence[Process]) -> Raw:
    """No probes for what runs to its end: it serves nobody."""
    if any(process.restart != "always" for process in processes):
        return {}
    return probes(port, max(process.start for process in processes))


def probes(port: int, start: float) -> Raw:
    """Startup within the budget, liveness by a thread of its own, readiness by what the process holds."""

    def probe(path: str, period: int, failures: int) -> Raw:
        return {
            "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
            "periodSeconds": period,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
            "successThreshold": 1,
        }

    return {
        "startupProbe": probe("/started", 5, max(1, -(-int(start) // 5))),
        "livenessProbe": probe("/health", 10, 6),
        "readinessProbe": probe("/ready", 2, 2),
    }


def _volumes(plan: PodPlan) -> list[Raw]:
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": plan.runs.claim}},
        {"name": "models", "persistentVolumeClaim": {"claimName": plan.models.claim, "readOnly": True}},
        {"name": "cache", "emptyDir": {"sizeLimit": plan.cache.size_limit}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": plan.shm.size_limit}},
    ]


def _sub_path(path: str) -> Raw:
    return {"subPath": path} if path else {}


def merge(under: Any, over: Any) -> Any:
    """`over` laid over `under`: maps by key, lists of named things by name, anything else replaced."""
    if isinstance(under, dict) and isinstance(over, dict):
        return {
            **under,
            **{key: merge(under[key], value) if key in under else value for key, value in over.items()},
        }
    if _named(under) and _named(over):
        laid = {one["name"]: one for one in over}
        first = [merge(one, laid.pop(one["name"], {})) for one in under]
        return [*first, *laid.values()]
    return over


def _named(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and "name" in one for one in value)
    )

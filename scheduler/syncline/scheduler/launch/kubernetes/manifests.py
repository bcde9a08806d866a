"""From a placement to the objects of a job, pure.

The processes of one job become pools. A pool is what one workload makes pods for: rollout workers that have devices of
their own, the trainer's ranks, sync, and one pool per set of devices that engines share. Objects belong to the job's
ConfigMap, so that nothing outlives it even if no scheduler ever comes back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from syncline.scheduler.launch.kubernetes.plan import PodPlan, Raw
from syncline.scheduler.launch.kubernetes.template import (
    JOB,
    KEPT,
    LOOK,
    POOL,
    PROCESSES,
    digest,
    labels,
    template,
)
from syncline.scheduler.launch.launcher import Placement, Process

APPLIED = (
    "syncline.dev/applied"  # annotation: digest of what the object was made from, when it was applied last
)
PLAN = "launcher.yaml"  # key of the owner's data
STARTS = "starts.json"
ID = re.compile(r"[a-z][a-z0-9]{0,30}")
QUEUE = "kueue.x-k8s.io/queue-name"
ORDINAL = "{}"  # in a process' name as a pool's pods are told it: the pod's ordinal


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that one workload's pods play. `pods` of them, each with all `containers`.

    name         of the workload
    role         whose images and part of the plan the pods get
    containers   container -> its processes; where there are several pods, those of the first
    names        container -> names of its processes, `{}` for the pod's ordinal
    """

    job: str
    name: str
    role: str
    pods: int
    containers: Mapping[str, tuple[Process, ...]]
    names: Mapping[str, tuple[str, ...]]

    def plays(self) -> frozenset[str]:
        """Names of all its processes."""
        return frozenset(
            played(pattern, ordinal)
            for patterns in self.names.values()
            for pattern in patterns
            for ordinal in range(self.pods)
        )


def played(pattern: str, ordinal: int) -> str:
    """The process that the pod with this ordinal plays."""
    return pattern.replace(ORDINAL, str(ordinal))


def fixed(plan: PodPlan) -> str:
    """Why the number of a pool's pods cannot change while they run; "": it can, the highest ordinals go first."""
    if plan.queue:
        return f"launcher.yaml names a queue, {plan.queue!r}: a gang is admitted whole, and begins anew at another size"
    return ""


def job_of(placement: Placement) -> str | None:
    """The one job of a placement; None: it is empty. Raises `ValueError` for several, or names that are not ids."""
    jobs = sorted({process.name.partition("/")[0] for process in placement.processes})
    if len(jobs) > 1:
        raise ValueError(f"a placement of several jobs: {', '.join(jobs)}")
    if jobs and not ID.fullmatch(jobs[0]):
        raise ValueError(f"job id {jobs[0]!r} is not of the form j0123456789: it cannot be a label")
    return jobs[0] if jobs else None


def pools(placement: Placement, plan: PodPlan) -> tuple[Pool, ...]:
    """The pools of a placement. Raises `ValueError` for a process whose role has no pods."""
    job = job_of(placement)
    if job is None:
        return ()
    own: dict[str, list[Process]] = {}
    shared: dict[str, list[Process]] = {}
    for process in placement.processes:
        plan.roles.of(process.role)
        group = (
            shared.setdefault(process.devices, []) if process.devices else own.setdefault(process.role, [])
        )
        group.append(process)
    found = [_replicas(job, role, processes) for role, processes in sorted(own.items())]
    return (*found, *(_together(job, devices, group, plan) for devices, group in sorted(shared.items())))


def _replicas(job: str, role: str, processes: Sequence[Process]) -> Pool:
    """A pool of pods with one process each, equal but for the worker's name, which the ordinal says."""
    first, many = processes[0], "SYNCLINE_WORKER" in processes[0].env or len(processes) > 1
    pattern = (
        f"{job}/w{ORDINAL}"
        if "SYNCLINE_WORKER" in first.env
        else f"{job}/{role}{ORDINAL}"
        if many
        else first.name
    )
    for ordinal, process in enumerate(processes):
        same = process.argv == first.argv and _kept(process) == _kept(first)
        if process.name != played(pattern, ordinal) or not same:
            raise ValueError(f"process {process.name!r} cannot be pod {ordinal} of a pool of {pattern!r}")
    return Pool(
        job=job,
        name=f"{job}-{role}",
        role=role,
        pods=len(processes),
        containers={role: (first,)},
        names={role: (pattern,)},
    )


def _together(job: str, devices: str, processes: Sequence[Process], plan: PodPlan) -> Pool:
    """One pod: all in one container under the local launcher, or with a claim to share, a container per role."""
    if not ID.fullmatch(devices):
        raise ValueError(f"devices {devices!r} must be a lower-case word: they name a pod")
    containers: dict[str, tuple[Process, ...]] = {"colocated": tuple(processes)}
    if plan.claim_template:
        roles = dict.fromkeys(process.role for process in processes)
        containers = {role: tuple(p for p in processes if p.role == role) for role in roles}
    names = {name: tuple(process.name for process in own) for name, own in containers.items()}
    return Pool(
        job=job, name=f"{job}-{devices}", role="colocated", pods=1, containers=containers, names=names
    )


def _kept(process: Process) -> dict[str, str]:
    return {name: process.env[name] for name in KEPT if name in process.env and name != "SYNCLINE_WORKER"}


def owner(job: str, plan: PodPlan, starts: str, above: Sequence[Raw] = (), kept: str | None = None) -> Raw:
    """The job's ConfigMap: the plan that its pods are made by, and how often each process was started.

    above   references to what the job itself belongs to
    kept    the plan as the job holds it, to the letter: another release may not write it as this one does
    """
    metadata: Raw = {"name": job, "labels": labels(plan, job, "job", job)}
    if above:
        metadata["ownerReferences"] = list(above)
    data = {PLAN: plan.text() if kept is None else kept, STARTS: starts}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def reference(body: Raw) -> Raw:
    """To a ConfigMap, with whose end an object ends."""
    name, uid = body["metadata"]["name"], body["metadata"]["uid"]
    return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid}


def objects(found: Sequence[Pool], plan: PodPlan, owner_uid: str, kept: str | None = None) -> tuple[Raw, ...]:
    """Everything else of the job, in the order of making. Raises `ValueError` for an override that cannot be.

    kept   the plan as the job holds it, to the letter; None: a new job's
    """
    if not found:
        return ()
    job = found[0].job
    service: Raw = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job, "labels": labels(plan, job, "job", job)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB: job, "app.kubernetes.io/instance": plan.release},
            "ports": [{"name": "health", "port": 8081, "protocol": "TCP"}],
        },
    }
    text = plan.text() if kept is None else kept
    made = ((pool, workload(pool, plan)) for pool in found)
    asked = ((body, _asked(pool, body["kind"], text, owner_uid)) for pool, body in made)
    return tuple(_owned(body, job, owner_uid, digest_) for body, digest_ in ((service, None), *asked))


def _asked(pool: Pool, kind: str, text: str, owner_uid: str) -> str:
    """Digest of what a workload's pods are made from: the job's plan and the pool's processes.

    Not of the manifest: a release that writes the same down in another form leaves running pods alone (0017). Nor of
    how many pods there are, but for a gang, which is admitted whole.
    """
    count = pool.pods if kind == "Job" else 0
    containers = {
        name: [
            [p.name, list(p.argv), {k: p.env[k] for k in KEPT if k in p.env}, p.start, p.restart] for p in own
        ]
        for name, own in pool.containers.items()
    }
    names = {name: list(patterns) for name, patterns in pool.names.items()}
    return digest([kind, text, owner_uid, pool.name, pool.role, count, containers, names])


def workload(pool: Pool, plan: PodPlan) -> Raw:
    """The object that makes a pool's pods."""
    shown = labels(plan, pool.job, pool.role, pool.name)
    names = {name: list(patterns) for name, patterns in pool.names.items()}
    pod = template(plan, pool.role, pool.containers, shown, names)
    metadata = {"name": pool.name, "labels": shown}
    selector = {"matchLabels": {JOB: pool.job, POOL: pool.name}}
    if plan.queue and pool.pods > 1:
        return _gang(pool, plan, pod, metadata)
    if pool.role == "sync":
        spec: Raw = {"replicas": 1, "strategy": {"type": "Recreate"}, "selector": selector, "template": pod}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
    if plan.queue:
        metadata = {**metadata, "labels": {**shown, QUEUE: plan.queue}}
    spec = {
        "serviceName": pool.job,
        "replicas": pool.pods,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": selector,
        "template": pod,
    }
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def _gang(pool: Pool, plan: PodPlan, pod: Raw, metadata: Raw) -> Raw:
    """A suspended Job, which Kueue resumes when there is room for all of its pods; it owns `suspend` from then on."""
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    for container in pod["spec"]["containers"]:
        for variable in container["env"]:
            if variable["name"] == "SYNCLINE_REPLICA":
                variable["valueFrom"] = index
    pod["spec"] |= {"restartPolicy": "OnFailure", "subdomain": pool.job}
    spec = {
        "suspend": True,
        "completionMode": "Indexed",
        "completions": pool.pods,
        "parallelism": pool.pods,
        "backoffLimit": 1_000_000,
        "template": pod,
    }
    shown = {**metadata["labels"], QUEUE: plan.queue}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {**metadata, "labels": shown}, "spec": spec}


def _owned(body: Raw, job: str, uid: str, asked: str | None) -> Raw:
    """`body` with its owner, and the digest by which a later turn knows that it has been applied; None: its own."""
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": job, "uid": uid, "controller": True}
    metadata = {**body["metadata"], "ownerReferences": [reference]}
    whole = {**body, "metadata": metadata}
    return {**whole, "metadata": {**metadata, "annotations": {APPLIED: asked or digest(whole)}}}


def rescaled(body: Raw, there: Raw) -> Raw:
    """`body` with the pods' template that the workload has, so that a pool which grows restarts no pod."""
    return {**body, "spec": {**body["spec"], "template": there["spec"]["template"]}}


def look_of(body: Raw) -> str | None:
    """The digest of the template that a workload's pods, or a pod, were made from."""
    made = body.get("spec", {}).get("template", body)
    found: str | None = made.get("metadata", {}).get("annotations", {}).get(LOOK)
    return found


__all__ = [
    "APPLIED",
    "PLAN",
    "PROCESSES",
    "STARTS",
    "Pool",
    "look_of",
    "objects",
    "owner",
    "played",
    "pools",
    "reference",
    "rescaled",
]

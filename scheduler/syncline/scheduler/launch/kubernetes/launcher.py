"""The Kubernetes launcher: objects in one namespace, made equal to the placement that is wanted, step by step.

Level-triggered. A turn compares what the mirror shows with what the placement calls for, and sends what differs;
nothing is remembered that the cluster does not hold. A turn that the server refuses is simply taken again, but for a
manifest that is wrong in itself, which is the job's failure.

Two rules are kept here and not by controllers. No process name lives in two pods: a workload is made once nothing else
plays its processes, which is how a switch of mode moves engines from one pool to another. And a job's pods are
made by the plan that lay in `launcher.yaml` when the job began, and made again only when that or their processes
change: not because a scheduler of another release would write them down in another form.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from syncline.runtime.lease import LeaseNotGiven
from syncline.scheduler.launch.kubernetes import manifests, seen
from syncline.scheduler.launch.kubernetes.api import Api, ApiError, Invalid, own_namespace
from syncline.scheduler.launch.kubernetes.inside import Inside
from syncline.scheduler.launch.kubernetes.leader import Leader, LeadershipLost
from syncline.scheduler.launch.kubernetes.manifests import APPLIED, PLAN, STARTS, look_of
from syncline.scheduler.launch.kubernetes.mirror import Mirror, Spawn
from syncline.scheduler.launch.kubernetes.plan import PodPlan, Raw, read
from syncline.scheduler.launch.kubernetes.template import JOB, MANAGER
from syncline.scheduler.launch.launcher import Observed, Placement

_LOG = logging.getLogger("syncline.scheduler")
SYNC = 30.0  # seconds for the first list of each kind
WORKLOADS = ("StatefulSet", "Deployment")
LOOK = 0.1  # seconds between two looks while everything is stopped

read_plan = lru_cache(maxsize=64)(read)


class KubernetesLauncher:
    """Owns a release's jobs in a namespace; see `Launcher`.

    plan       of `launcher.yaml`
    spawn      starts a thread whose failure ends the process
    holder     who leads, in the lease
    stopping   ends the wait for the lease
    client     of the API server; None: as the pod, or KUBECONFIG, says
    Raises `ValueError` for a plan that asks for kinds which the cluster does not have, `LeaseNotGiven` when told to
    stop before this scheduler leads, `ApiError` when the server cannot be read.
    """

    def __init__(
        self, plan: PodPlan, spawn: Spawn, holder: str, stopping: threading.Event, client: Any = None
    ) -> None:
        self.fixed = manifests.fixed(plan)
        self._plan = plan
        self._api = Api(plan.namespace or own_namespace(), client)
        _require_kinds(self._api, plan)
        self._leader = Leader(self._api, plan.lease, f"{socket.gethostname()}_{holder}")
        if not self._leader.acquire(stopping):
            raise LeaseNotGiven("told to stop before the lease in the cluster was given")
        self._ended = threading.Event()
        spawn("leader", lambda: self._leader.renew_until(self._ended))
        selector = f"app.kubernetes.io/managed-by={MANAGER},app.kubernetes.io/instance={plan.release}"
        self._workloads = (*WORKLOADS, "Job") if plan.queue else WORKLOADS
        kinds = ("ConfigMap", "Service", *self._workloads, "Pod")
        self._mirror = Mirror(self._api, kinds, selector, spawn)
        if not self._mirror.await_synced(SYNC):
            raise ApiError(0, f"namespace {self._api.namespace} could not be listed within {SYNC:.0f} s")
        self._inside = Inside(lambda: list(self._mirror.objects("Pod").values()), self._ended, spawn)
        self._wanted: frozenset[str] = frozenset()
        self._counts: dict[str, seen.Count] = {}
        self._counted: str | None = None  # job whose starts were taken up from its owner
        self._told = ""

    def apply(self, placement: Placement) -> None:
        """Take the next step towards `placement`. Raises `ValueError` for one that the cluster will never take."""
        job = manifests.job_of(placement)
        self._wanted = frozenset(process.name for process in placement.processes)
        if not self._leader.leads:
            return
        try:
            for other in sorted(self._jobs() - {job}):
                self._remove(other)
            if job is not None:
                self._converge(job, placement)
        except Invalid as error:
            raise ValueError(f"the cluster refuses the job's objects: {error}") from None
        except ApiError as error:
            if str(error) != self._told:
                self._told = str(error)
                _LOG.warning("%s", error)
        else:
            self._told = ""

    def observe(self) -> Observed:
        """What is there now. A process that is wanted and in no pod waits."""
        pods = list(self._mirror.objects("Pod").values())
        inner = self._inside.views()
        self._counts = seen.count(pods, inner, self._counts)
        played = {name for body in self._all() for name in _plays(body)}
        return seen.observe(pods, inner, self._counts, self._wanted | played)

    def stop_all(self) -> None:
        """Delete everything of this release's jobs and wait until it is gone. Raises `LeadershipLost`."""
        self.apply(Placement())
        while self._jobs():
            if not self._leader.leads:
                raise LeadershipLost("another scheduler leads")
            time.sleep(LOOK)
            self.apply(Placement())

    def close(self) -> None:
        """Give up the lease and leave the pods running, for the next owner to adopt."""
        self._ended.set()
        self._mirror.close()
        self._leader.release()

    # ---- one job -------------------------------------------------------------------------------------------
    def _converge(self, job: str, placement: Placement) -> None:
        owner = self._mirror.objects("ConfigMap").get(job)
        if owner is None:
            self._counts, self._counted = {}, job
            owner = self._api.apply(manifests.owner(job, self._plan, "{}", self._above()))
        elif "deletionTimestamp" in owner["metadata"]:
            return
        plan = self._plan_of(owner)
        self._keep_counts(job, owner, plan)
        pools = manifests.pools(placement, plan)
        bodies = manifests.objects(pools, plan, owner["metadata"]["uid"], owner["data"][PLAN])
        wanted = {body["metadata"]["name"]: body for body in bodies}
        for body in self._all(job):
            if body["metadata"]["name"] not in wanted:
                self._delete(body)
        plays = {pool.name: pool.plays() for pool in pools}
        for name, body in wanted.items():
            if not self._held(job, name, plays.get(name, frozenset())):
                self._bring(body)
        for body in wanted.values():
            self._replace_pods(job, body)

    def _plan_of(self, owner: Raw) -> PodPlan:
        """The plan that the job began with."""
        text = owner.get("data", {}).get(PLAN)
        if text is None:
            raise ValueError(f"ConfigMap {owner['metadata']['name']} holds no {PLAN}: somebody emptied it")
        return read_plan(text)

    def _keep_counts(self, job: str, owner: Raw, plan: PodPlan) -> None:
        """Starts are counted beyond the life of pods and of schedulers: the owner keeps them."""
        kept = owner["data"].get(STARTS, "{}")
        if self._counted != job:
            self._counts, self._counted = msgspec.json.decode(kept, type=dict[str, seen.Count]), job
        self._counts = {name: count for name, count in self._counts.items() if name.startswith(f"{job}/")}
        text = msgspec.json.encode(self._counts, order="sorted").decode()
        if self._counts and text != kept:
            self._api.apply(manifests.owner(job, plan, text, self._above(), owner["data"][PLAN]))

    def _above(self) -> list[Raw]:
        """What jobs belong to. Raises `Missing` once that is gone: no job is begun under a release that ends."""
        name = self._plan.owner
        return [manifests.reference(self._api.get("ConfigMap", name))] if name else []

    def _held(self, job: str, name: str, plays: frozenset[str]) -> bool:
        """Whether something else still plays one of these processes, or the old one of this name has not gone."""
        for body in self._all(job):
            mine = body["metadata"]["name"] == name
            if mine and "deletionTimestamp" in body["metadata"]:
                return True
            if not mine and plays & _plays(body):
                return True
        others = (pod for pod in self._pods(job) if seen.pool_of(pod) != name and not seen.over(pod))
        return any(plays & seen.plays(pod).keys() for pod in others)

    def _bring(self, body: Raw) -> None:
        """Make the object, or make it as it should be."""
        kind, name = body["kind"], body["metadata"]["name"]
        there = self._mirror.objects(kind).get(name)
        if there is not None and _applied(there) == _applied(body):
            if _replicas(there) == _replicas(body):
                return
            if look_of(there) != look_of(body):  # another release made them
                body = manifests.rescaled(body, there)
        if kind != "Job":
            self._api.apply(body)
        elif there is None:  # whose `suspend` is Kueue's from then on
            self._api.create(body)
        else:
            self._delete(there)

    def _replace_pods(self, job: str, wanted: Raw) -> None:
        """Delete pods that were made from an older template than their workload has, and those that are over."""
        pool = wanted["metadata"]["name"]
        workload = next((body for body in self._all(job) if body["metadata"]["name"] == pool), None)
        if workload is None or _applied(workload) != _applied(wanted):
            return
        for pod in self._pods(job):
            old = workload["kind"] == "StatefulSet" and look_of(pod) != look_of(workload)
            if seen.pool_of(pod) == pool and (old or seen.over(pod)):
                self._delete(pod)

    def _remove(self, job: str) -> None:
        """A step towards nothing of `job`: workloads first, what they belong to last."""
        workloads, pods = self._all(job), self._pods(job)
        for body in workloads:
            self._delete(body)
        if workloads or pods:
            return
        for kind in ("Service", "ConfigMap"):
            for body in self._of(kind, job):
                self._delete(body)

    def _delete(self, body: Raw) -> None:
        """Once. A workload stays until its pods have gone."""
        metadata, kind = body["metadata"], body["kind"]
        if "deletionTimestamp" not in metadata:
            _LOG.info("deletes %s %s", kind, metadata["name"])
            policy = "Foreground" if kind in self._workloads else "Background"
            self._api.delete(kind, metadata["name"], metadata["uid"], policy)

    # ---- what is there ---------------------------------------------------------------------------------------
    def _all(self, job: str | None = None) -> list[Raw]:
        """All workloads, of one job or of every one."""
        return [body for kind in self._workloads for body in self._of(kind, job)]

    def _pods(self, job: str) -> Sequence[Raw]:
        return self._of("Pod", job)

    def _of(self, kind: str, job: str | None) -> list[Raw]:
        found = self._mirror.objects(kind).values()
        return [body for body in found if job is None or body["metadata"]["labels"].get(JOB) == job]

    def _jobs(self) -> set[str]:
        """Every job of which anything is there."""
        kinds = ("ConfigMap", "Service", *self._workloads, "Pod")
        return {str(body["metadata"]["labels"].get(JOB)) for kind in kinds for body in self._of(kind, None)}


def _require_kinds(api: Api, plan: PodPlan) -> None:
    """Fail closed: pods that ask for what nobody gives would wait for ever."""
    for key, value, group in (
        ("claimTemplate", plan.claim_template, "resource.k8s.io"),
        ("queue", plan.queue, "kueue.x-k8s.io"),
    ):
        if value and not api.serves(group):
            raise ValueError(f"launcher.yaml: {key} {value!r}: this cluster does not serve {group}")


def _plays(workload: Raw) -> frozenset[str]:
    """Names of the processes that a workload's pods play."""
    spec = workload["spec"]
    pods = spec.get("replicas", spec.get("parallelism", 1))
    named = {"metadata": {**spec["template"]["metadata"], "name": ""}}
    found: set[str] = set()
    for ordinal in range(pods):
        named["metadata"]["name"] = f"{workload['metadata']['name']}-{ordinal}"
        found |= seen.plays(named).keys()
    return frozenset(found)


def _applied(body: Raw) -> str | None:
    found: str | None = body["metadata"].get("annotations", {}).get(APPLIED)
    return found


def _replicas(body: Raw) -> int | None:
    found: int | None = body["spec"].get("replicas")
    return found

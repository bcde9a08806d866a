"""From the pods of a job to what runs, pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec

from syncline.scheduler.launch.kubernetes.manifests import played
from syncline.scheduler.launch.kubernetes.plan import Raw
from syncline.scheduler.launch.kubernetes.template import POOL, PROCESSES
from syncline.scheduler.launch.launcher import Observed, ProcessView

INDEX = "batch.kubernetes.io/job-completion-index"
State = Literal["running", "waiting", "stopping", "exited"]


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """Starts of a process: `before` in pods that are gone, `here` in the pod `uid`.

    life   of the container that it shares, when its entry last spoke of it
    """

    before: int = 0
    uid: str = ""
    here: int = 0
    life: str = ""

    @property
    def starts(self) -> int:
        """All of them."""
        return self.before + self.here

    def seen(self, uid: str, lives: int, life: str = "") -> Count:
        """After the pod `uid` was seen to have started it `lives` times."""
        if uid == self.uid:
            return Count(before=self.before, uid=uid, here=max(self.here, lives), life=life or self.life)
        return Count(before=self.starts, uid=uid, here=lives, life=life) if lives else self


Counts = Mapping[str, Count]
Inner = Mapping[str, Observed]
"""Pod's uid -> what its entry said of the processes inside."""


def plays(pod: Raw) -> dict[str, str]:
    """Process -> container of this pod that plays it."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations", {})
    ordinal = annotations.get(INDEX) or metadata["name"].rpartition("-")[2]
    number = int(ordinal) if ordinal.isdecimal() else 0
    told: dict[str, list[str]] = json.loads(annotations.get(PROCESSES, "{}"))
    return {played(pattern, number): name for name, patterns in told.items() for pattern in patterns}


def entries(pod: Raw) -> dict[str, str]:
    """Container in which several processes share an entry -> which life of it this is; "": it does not run."""
    told: dict[str, list[str]] = json.loads(pod["metadata"].get("annotations", {}).get(PROCESSES, "{}"))
    shared = [name for name, patterns in told.items() if len(patterns) > 1]
    lives = {name: _status(pod, name).get("state", {}).get("running") for name in shared}
    return {
        name: "" if life is None else f"{pod['metadata']['uid']} {life.get('startedAt')}"
        for name, life in lives.items()
    }


def pool_of(body: Raw) -> str:
    """The workload that this object is, or is of."""
    return str(body["metadata"].get("labels", {}).get(POOL, ""))


def over(pod: Raw) -> bool:
    """Whether none of its containers will run again."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def count(pods: Iterable[Raw], inner: Inner, counts: Counts) -> dict[str, Count]:
    """`counts` after these pods were seen."""
    found = dict(counts)
    for pod in sorted(pods, key=_order):
        uid = pod["metadata"]["uid"]
        for process, container in plays(pod).items():
            view = _inside(inner, uid, process)
            life = entries(pod).get(container)
            known = found.get(process, Count())
            if life is None:
                found[process] = known.seen(uid, _lives(_status(pod, container)))
            elif view is not None:
                found[process] = known.seen(uid, view.starts, life)
    return found


def observe(pods: Iterable[Raw], inner: Inner, counts: Counts, also: Iterable[str]) -> Observed:
    """What runs. `also`: processes that are wanted, though no pod plays them yet; they wait."""
    views: dict[str, ProcessView] = {}
    for pod in sorted(pods, key=_order):  # of two pods with one process, the last speaks
        for process, container in plays(pod).items():
            view = _inside(inner, pod["metadata"]["uid"], process)
            views[process] = _view(process, pod, container, view, counts.get(process, Count()))
    for process in also:
        if process not in views:
            starts = counts.get(process, Count()).starts
            views[process] = ProcessView(
                name=process,
                state="waiting",
                pid=None,
                exit=None,
                starts=starts,
                restarts=max(0, starts - 1),
                since=0.0,
            )
    return Observed(processes=views)


def _order(pod: Raw) -> tuple[bool, bool, str]:
    """Pods that are over first, then those that end, then by age."""
    metadata = pod["metadata"]
    return not over(pod), "deletionTimestamp" not in metadata, metadata.get("creationTimestamp", "")


def _view(process: str, pod: Raw, container: str, inner: ProcessView | None, count: Count) -> ProcessView:
    """A process as its container is, or where several share that, as their entry says.

    Of an entry that has not spoken yet: what ran in this life of its container is taken to run; in a new one, nothing.
    """
    starts, life = count.starts, entries(pod).get(container)
    status = _status(pod, container)
    running = status.get("state", {}).get("running")
    state: State = "waiting"
    if running is not None and not over(pod):
        if "deletionTimestamp" in pod["metadata"]:
            state = "stopping"
        elif inner is not None:
            state = inner.state
        elif life is None or life == count.life:
            state = "running"
    return ProcessView(
        name=process,
        state=state,
        pid=None,
        exit=_exit(status) if inner is None or inner.exit is None else inner.exit,
        starts=starts,
        restarts=max(0, starts - 1),
        since=inner.since if inner is not None else _seconds(running.get("startedAt")) if running else 0.0,
    )


def _inside(inner: Inner, uid: str, process: str) -> ProcessView | None:
    return inner[uid].processes.get(process) if uid in inner else None


def _status(pod: Raw, container: str) -> Raw:
    found: list[Raw] = pod.get("status", {}).get("containerStatuses") or []
    return next((status for status in found if status["name"] == container), {})


def _lives(status: Raw) -> int:
    """How often the container was started."""
    ran = any(
        status.get(which, {}).get(how)
        for which in ("state", "lastState")
        for how in ("running", "terminated")
    )
    return int(status.get("restartCount", 0)) + bool(ran)


def _exit(status: Raw) -> int | None:
    """The last exit code; that of a signal is negative, as elsewhere."""
    for which in ("state", "lastState"):
        ended: dict[str, Any] | None = status.get(which, {}).get("terminated")
        if ended is not None:
            code = int(ended["exitCode"])
            return 128 - code if code > 128 else code
    return None


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0

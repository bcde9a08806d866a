"""What the entry of a pod says of the processes that share its container (`launch/pod.py`)."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable

import msgspec

from syncline.scheduler.launch.kubernetes import seen
from syncline.scheduler.launch.kubernetes.mirror import Spawn
from syncline.scheduler.launch.kubernetes.plan import Raw
from syncline.scheduler.launch.kubernetes.template import PROCESSES
from syncline.scheduler.launch.launcher import Observed

ASK = 1.0  # seconds between questions, and for an answer


class Inside:
    """Asks pods in which several processes share a container. One that does not answer is as it was last."""

    def __init__(self, pods: Callable[[], list[Raw]], ended: threading.Event, spawn: Spawn) -> None:
        self._pods, self._ended = pods, ended
        self._views: dict[str, Observed] = {}
        spawn("inside", self._follow)

    def views(self) -> seen.Inner:
        """Pod's uid -> its processes."""
        return self._views

    def _follow(self) -> None:
        while not self._ended.wait(ASK):
            found: dict[str, Observed] = {}
            for pod in self._pods():
                uid, ports = pod["metadata"]["uid"], entries(pod)
                said = [
                    answer for port in ports if (answer := _ask(pod["status"]["podIP"], port)) is not None
                ]
                if said:
                    found[uid] = Observed(
                        processes={name: view for one in said for name, view in one.processes.items()}
                    )
                elif ports and uid in self._views:
                    found[uid] = self._views[uid]
            self._views = found


def entries(pod: Raw) -> list[int]:
    """Ports at which entries of this pod answer; none while it has no address."""
    told: dict[str, list[str]] = json.loads(pod["metadata"].get("annotations", {}).get(PROCESSES, "{}"))
    if not pod.get("status", {}).get("podIP") or seen.over(pod):
        return []
    containers = {container["name"]: container for container in pod["spec"]["containers"]}
    return [containers[name]["ports"][0]["containerPort"] for name, names in told.items() if len(names) > 1]


def _ask(host: str, port: int) -> Observed | None:
    connection = http.client.HTTPConnection(host, port, timeout=ASK)
    try:
        connection.request("GET", "/processes")
        answer = connection.getresponse()
        return msgspec.json.decode(answer.read(), type=Observed) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return None
    finally:
        connection.close()

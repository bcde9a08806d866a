"""What the entry of a pod says of the processes that share its container (`launch/pod.py`)."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable

import msgspec

from syncline.scheduler.launch.kubernetes import seen
from syncline.scheduler.launch.kubernetes.mirror import Spawn
from syncline.scheduler.launch.kubernetes.plan import Raw
from syncline.scheduler.launch.launcher import Observed

ASK = 1.0  # seconds between questions, and for an answer


class Inside:
    """Asks pods in which several processes share a container. One that does not answer is as it was last."""

    def __init__(self, pods: Callable[[], list[Raw]], ended: threading.Event, spawn: Spawn) -> None:
        self._pods, self._ended = pods, ended
        self._views: dict[str, Observed] = {}  # by pod's uid
        self._lives: dict[str, Observed] = {}  # life of a container -> what it said last
        spawn("inside", self._follow)

    def views(self) -> seen.Inner:
        """Pod's uid -> its processes."""
        return self._views

    def _follow(self) -> None:
        while not self._ended.wait(ASK):
            known, found = self._lives, {}
            self._lives = {}
            for pod in self._pods():
                uid, said = pod["metadata"]["uid"], []
                for container, life in seen.entries(pod).items():
                    address = pod["status"].get("podIP")
                    answer = _ask(address, _port(pod, container)) if life and address else None
                    answer = known.get(life) if answer is None else answer
                    if answer is not None:
                        self._lives[life] = answer
                        said.append(answer)
                found[uid] = Observed(
                    processes={name: view for one in said for name, view in one.processes.items()}
                )
            self._views = found


def _port(pod: Raw, container: str) -> int:
    """Where the entry of a container answers."""
    return int(
        next(
            one["ports"][0]["containerPort"] for one in pod["spec"]["containers"] if one["name"] == container
        )
    )


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

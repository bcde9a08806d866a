"""A copy of what is there: per kind a list, then a watch from where the list ended.

consumes      the API server's lists and watches, one thread per kind
produces      `objects(kind)`, by name
waits for     changes, at most `WATCH` seconds at a time; after a failure, a back-off
unblocked by  the server, and its absence: a watch that ended is begun again, one that is too old (410) is relisted
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from syncline.scheduler.launch.kubernetes.api import Api, ApiError, Gone
from syncline.scheduler.launch.kubernetes.plan import Raw

_LOG = logging.getLogger("syncline.scheduler")
WATCH = 60  # seconds that a watch lasts
RELIST = 600.0  # seconds after which everything is listed again, whatever the watch said
FIRST, LAST = 0.2, 10.0  # seconds of back-off
Spawn = Callable[[str, Callable[[], None]], threading.Thread]


class Mirror:
    """What is there of some kinds. `spawn` starts a thread whose failure ends the process."""

    def __init__(
        self, api: Api, kinds: tuple[str, ...], selector: str, spawn: Spawn, seconds: int = WATCH
    ) -> None:
        self._api, self._selector, self._seconds = api, selector, seconds
        self._objects: dict[str, dict[str, Raw]] = {kind: {} for kind in kinds}
        self._synced = {kind: threading.Event() for kind in kinds}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.relists = dict.fromkeys(kinds, 0)
        for kind in kinds:
            spawn(f"mirror-{kind}", partial(self._follow, kind))

    def await_synced(self, seconds: float) -> bool:
        """Whether every kind was listed within `seconds`."""
        end = time.monotonic() + seconds
        return all(event.wait(max(0.0, end - time.monotonic())) for event in self._synced.values())

    def objects(self, kind: str) -> Mapping[str, Raw]:
        """All of a kind, by name: a copy of the moment."""
        with self._lock:
            return dict(self._objects[kind])

    def close(self) -> None:
        """End the threads when their watches end."""
        self._closed.set()

    def _follow(self, kind: str) -> None:
        back_off = FIRST
        while not self._closed.is_set():
            try:
                version = self._list(kind)
                listed, back_off = time.monotonic(), FIRST
                while not self._closed.is_set() and time.monotonic() - listed < RELIST:
                    version = self._watch(kind, version)
            except Gone as error:
                _LOG.info("%s is listed again: %s", kind, error)
            except ApiError as error:
                _LOG.warning("%s cannot be followed: %s", kind, error)
                self._closed.wait(back_off)
                back_off = min(LAST, 2 * back_off)

    def _list(self, kind: str) -> str:
        items, version = self._api.list(kind, self._selector)
        with self._lock:
            self._objects[kind] = {item["metadata"]["name"]: item for item in items}
        self.relists[kind] += 1
        self._synced[kind].set()
        return version

    def _watch(self, kind: str, version: str) -> str:
        """Follow until the watch ends; the version that the next goes on from."""
        for change, item in self._api.watch(kind, self._selector, version, self._seconds):
            version = item["metadata"]["resourceVersion"]
            name = item["metadata"].get("name")
            with self._lock:
                if change == "DELETED":
                    self._objects[kind].pop(name, None)
                elif change != "BOOKMARK":
                    self._objects[kind][name] = {**item, "kind": kind}
            if self._closed.is_set():
                break
        return version

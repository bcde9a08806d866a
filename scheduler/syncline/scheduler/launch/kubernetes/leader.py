"""The leader's lease in the cluster: of several schedulers, one launches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from syncline.scheduler.launch.kubernetes.api import Api, ApiError, Conflict, Missing
from syncline.scheduler.launch.kubernetes.plan import Raw

_LOG = logging.getLogger("syncline.scheduler")
DURATION = 15.0  # seconds that a lease holds without being renewed
RENEW = 4.0  # seconds between renewals
RETRY = 1.0  # seconds between looks at another's lease
SAFE = 3.0  # seconds before its end in which the holder acts no more


class LeadershipLost(RuntimeError):
    """Another scheduler holds the lease, or this one could not renew it in time."""


class Leader:
    """A lease named `name`, held by `holder`.

    Time is this process's own: another's lease has run out when it has not changed for its duration under our eyes.
    So clocks of machines may differ.
    """

    def __init__(self, api: Api, name: str, holder: str, duration: float = DURATION) -> None:
        self._api, self._name, self._holder, self._duration = api, name, holder, duration
        self._until = float("-inf")  # monotonic second at which our lease runs out
        self._seen: tuple[str, float] = ("", 0.0)  # resource version of the lease, and since when it is that

    @property
    def leads(self) -> bool:
        """Whether nobody else can hold the lease now."""
        return time.monotonic() < self._until - SAFE

    def acquire(self, stopping: threading.Event) -> bool:
        """Wait until the lease is ours. False: told to stop meanwhile."""
        while not stopping.is_set():
            if self.turn():
                _LOG.info("leads: %s", self._holder)
                return True
            stopping.wait(RETRY)
        return False

    def turn(self) -> bool:
        """Take or renew the lease, if that can be. False: it is another's, or the server does not answer."""
        asked = time.monotonic()
        try:
            lease = self._api.get("Lease", self._name)
        except Missing:
            return self._write(self._api.create, {"name": self._name}, 0, asked)
        except ApiError as error:
            _LOG.warning("lease: %s", error)
            return False
        spec = lease.get("spec", {})
        version, holder = lease["metadata"]["resourceVersion"], spec.get("holderIdentity") or ""
        if version != self._seen[0]:
            self._seen = (version, asked)
        free = not holder or asked - self._seen[1] > float(spec.get("leaseDurationSeconds") or 0)
        if holder != self._holder and not free:
            self._until = float("-inf")
            return False
        changes = int(spec.get("leaseTransitions") or 0) + (holder != self._holder)
        metadata = {"name": self._name, "resourceVersion": version}
        return self._write(self._api.replace, metadata, changes, asked)

    def renew_until(self, ended: threading.Event) -> None:
        """Renew until `ended`. Raises `LeadershipLost` when it is another's, or could not be renewed in time."""
        while not ended.wait(RENEW if self.leads else RETRY):
            if not self.turn() and not self.leads:
                raise LeadershipLost(f"lease {self._name} is not {self._holder}'s any more")

    def release(self) -> None:
        """Let the next have it at once, if it is ours."""
        self._until = float("-inf")
        try:
            lease = self._api.get("Lease", self._name)
            if lease["spec"].get("holderIdentity") == self._holder:
                self._api.replace({**lease, "kind": "Lease", "spec": {**lease["spec"], "holderIdentity": ""}})
        except ApiError as error:
            _LOG.info("lease not given back: %s", error)

    def _write(self, how: Callable[[Raw], Raw], metadata: Raw, changes: int, asked: float) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": round(self._duration),
            "renewTime": now,
            "leaseTransitions": changes,
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        try:
            how(body)
        except Conflict:
            return False
        except ApiError as error:
            _LOG.warning("lease: %s", error)
            return False
        self._until = asked + self._duration
        return True

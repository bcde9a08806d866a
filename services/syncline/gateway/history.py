"""Which jobs there are: from Redis, and those that only their folder still knows; of one tenant, or of all.

With ten thousand jobs a listing must not look at each of them. The order is kept between requests and made anew when a
job came or went: Redis tells by the number of jobs and the newest one, the run root by its time of change.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from syncline.contract.streams import JOB, JOBS, OWNED
from syncline.runtime.bus import Bus
from syncline.runtime.durable import write_whole
from syncline.runtime.settings import Settings
from syncline.runtime.tokens import DEFAULT, Who

JOB_ID = re.compile(r"j[0-9a-f]{10}")
TENANT_FILE = "tenant"
_KEPT = 64  # tenants whose order is kept

Order = list[tuple[str, float]]


class History:
    """Safe for threads. Holds nothing that cannot be read again."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus, self._settings = bus, settings
        self._lock = threading.Lock()
        self._folders: dict[str, tuple[str, float]] = {}  # job -> tenant, time made; of folders with a spec
        self._orders: dict[str, tuple[object, Order, dict[str, int]]] = {}  # by tenant, "": of all

    def visible(self, who: Who) -> tuple[Order, dict[str, int]]:
        """Jobs that `who` may see with the time each was made, newest first; and the place of each."""
        key = JOBS.at() if who.admin else OWNED.at(who.tenant)
        counted, newest = self._bus.many([("ZCARD", key), ("ZREVRANGE", key, 0, 0)])
        try:
            changed = self._settings.runs.stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        stamp = (counted, newest[0] if newest else b"", changed)
        name = "" if who.admin else who.tenant
        with self._lock:
            known = self._orders.pop(name, None)
            if known is None or known[0] != stamp:
                order = self._ordered(key, None if who.admin else who.tenant)
                known = (stamp, order, {job: place for place, (job, _) in enumerate(order)})
            self._orders[name] = known  # the last used is last
            while len(self._orders) > _KEPT:
                del self._orders[next(iter(self._orders))]
        return known[1], known[2]

    def enter(self, job: str, tenant: str) -> None:
        """Say in the folder of a job that is about to be made whose it is; of the operator's, nothing is said."""
        if tenant != DEFAULT:
            folder = self._settings.job_dir(job)
            folder.mkdir(parents=True)
            write_whole(folder / TENANT_FILE, tenant.encode() + b"\n")

    def leave(self, job: str) -> None:
        """Take back what `enter` said of a job that was not made."""
        folder = self._settings.job_dir(job)
        if (folder / TENANT_FILE).exists():
            (folder / TENANT_FILE).unlink()
            folder.rmdir()

    def sweep(self, tenant: str) -> int:
        """Take jobs out of the tenant's history that neither Redis nor a folder knows. Returns how many."""
        jobs = [job.decode() for job in self._bus.zrange(OWNED.at(tenant))]
        states = self._bus.many([("EXISTS", JOB.at(job)) for job in jobs]) if jobs else []
        known = zip(jobs, states, strict=True)
        gone = [job for job, there in known if not there and not self._settings.job_dir(job).exists()]
        return int(self._bus.call("ZREM", OWNED.at(tenant), *gone)) if gone else 0

    def _ordered(self, key: str, tenant: str | None) -> Order:
        found = {job.decode(): at for job, at in self._bus.zscores(key)}
        self._look()
        for job, (owner, at) in self._folders.items():
            if job not in found and tenant in (None, owner):
                found[job] = at
        return sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))

    def _look(self) -> None:
        """Make `_folders` agree with the run root; a folder that is known is not looked into again."""
        try:
            names = {name for name in os.listdir(self._settings.runs) if JOB_ID.fullmatch(name)}
        except FileNotFoundError:
            names = set()
        self._folders = {job: told for job, told in self._folders.items() if job in names}
        for name in names - self._folders.keys():
            folder = self._settings.runs / name
            try:
                at = (folder / "spec.json").stat().st_mtime
            except (FileNotFoundError, NotADirectoryError):
                continue
            self._folders[name] = (kept_owner(folder) or DEFAULT, at)


def owner_of(bus: Bus, settings: Settings, job: str) -> str | None:
    """The tenant of a well-formed job id, None: there is no such job.

    The same two look-ups, whatever they find: how long they take does not tell whether a job is there.
    """
    told, state = bus.many([("HMGET", JOB.at(job), "tenant", "state")])[0]
    kept = kept_owner(settings.job_dir(job))
    if told is not None:
        return str(told.decode())
    return kept or (DEFAULT if state is not None else None)


def kept_owner(folder: Path) -> str | None:
    """The tenant that a job's folder names, the operator's where it has a spec and names none, None: no job."""
    try:
        return (folder / TENANT_FILE).read_text("ascii").strip() or DEFAULT
    except (FileNotFoundError, NotADirectoryError):
        return DEFAULT if (folder / "spec.json").exists() else None

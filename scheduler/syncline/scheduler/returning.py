"""Jobs that Redis has forgotten and the run root still has: they go on from their folders.

A server that came back empty knows no job. A folder with a spec and without an end is one that was to run: it enters
the list again as queued, its trainer resumes from checkpoints and segments, and the ledger is told of every update
that a segment proves. What was sampled and not yet in a segment is sampled again.
"""

from __future__ import annotations

import logging
import time
from logging import Logger
from pathlib import Path

import msgspec
from pydantic import ValidationError

from syncline.contract.job import JobSpec
from syncline.contract.streams import JOB, JOBS, LOCK, OWNED, UNENDED
from syncline.runtime.bus import Bus
from syncline.runtime.durable import write_whole
from syncline.runtime.tokens import DEFAULT
from syncline.scheduler.launch.launcher import Launcher, Placement
from syncline.scheduler.saved import SERVICE

_LOG = logging.getLogger("syncline.scheduler")
ENDED = "ended.json"
STOPPING = 60.0  # seconds that processes of a forgotten job get to leave
REASON = "Redis had forgotten it: it goes on from its folder"

_ENTER = """
-- KEYS: lock, job, jobs, the tenant's two. ARGV: holder, job, spec, spec hash, name, created, reason, tenant.
-- 1: entered; 0: the lease is another's, or the job is known.
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('HSET', KEYS[2], 'spec', ARGV[3], 'spec_hash', ARGV[4], 'name', ARGV[5], 'state', 'queued',
           'reason', ARGV[7], 'waits', '[]', 'created', ARGV[6], 'tenant', ARGV[8])
redis.call('ZADD', KEYS[3], ARGV[6], ARGV[2])
redis.call('ZADD', KEYS[4], ARGV[6], ARGV[2])
redis.call('SADD', KEYS[5], ARGV[2])
return 1
"""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """`ended.json`: how a job ended, for a Redis that will not know it any more."""

    state: str
    reason: str
    ended: float


def mark_ended(folder: Path, state: str, reason: str) -> None:
    """Say on disk that the job of `folder` is over; where nothing can be written, only Redis says it."""
    try:
        if folder.is_dir():
            end = End(state=state, reason=reason, ended=time.time())
            write_whole(folder / ENDED, msgspec.json.encode(end))
    except OSError as error:
        _LOG.warning("%s: its end is not on disk: %s", folder.name, error)


def bring_back(bus: Bus, holder: str, runs: Path, launcher: Launcher, log: Logger) -> list[str]:
    """Enter forgotten jobs into the list again, oldest first; their ids.

    Processes that a forgotten job has left running obey orders that nobody remembers: they are stopped first.
    """
    found = [folder for folder in _open_folders(runs) if not bus.hgetall(JOB.at(folder.name))]
    if found:
        _stop_all(launcher)
    entered = []
    for folder in found:
        try:
            spec = JobSpec.model_validate_json((folder / "spec.json").read_bytes())
        except (ValidationError, OSError) as error:
            log.error("%s is not brought back: %s", folder.name, error)
            continue
        made = repr((folder / "spec.json").stat().st_mtime)
        tenant = (folder / "tenant").read_text().strip() if (folder / "tenant").is_file() else DEFAULT
        keys = [LOCK.at(SERVICE), JOB.at(folder.name), JOBS.at(), OWNED.at(tenant), UNENDED.at(tenant)]
        args = [holder, folder.name, spec.canonical(), spec.hash(), spec.name, made, REASON, tenant]
        if int(bus.script(_ENTER)(keys, args)):
            log.warning("%s: %s", folder.name, REASON)
            entered.append(folder.name)
    return entered


def _open_folders(runs: Path) -> list[Path]:
    """Folders of jobs that have a spec and no end, by the age of the spec. A job of old has a summary for its end."""
    found = [
        path.parent
        for path in runs.glob("j*/spec.json")
        if not (path.parent / ENDED).exists() and not (path.parent / "summary.json").exists()
    ]
    return sorted(found, key=lambda folder: (folder / "spec.json").stat().st_mtime)


def _stop_all(launcher: Launcher) -> None:
    end = time.monotonic() + STOPPING
    launcher.apply(Placement())
    while launcher.observe().processes and time.monotonic() < end:
        time.sleep(0.05)
        launcher.apply(Placement())

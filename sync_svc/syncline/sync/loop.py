"""The sync service of one job.

Consumes:      `minted` (group sync), `acks` (group sync), `phase`, workers' heartbeats and status; `proofs`.
Produces:      blobs and signed manifests in the store; `sync` orders, `versions` records, `proofs` that are wanted;
               Active, SyncFailed, VersionRefused.
               Beside the loop, deltas and what changed (`deltas.py`).
Waits for:     a minted version, a worker's answer, a proof where the spec demands it, an order's deadline.
Unblocked by:  the trainer that mints, workers and the validator that answer, the scheduler that changes the phase.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from syncline.contract.job import JobSpec
from syncline.contract.streams import ACKS, JOB, MINTED, PHASES, PROOFS
from syncline.runtime.service import ServiceContext
from syncline.runtime.store import BlobStore
from syncline.sync.control import Control
from syncline.sync.deltas import Deltas
from syncline.sync.manifest import read_key
from syncline.sync.pinned import Pinned
from syncline.sync.publish import Publisher
from syncline.transport.kinds import offering

POLL = 0.25  # seconds after which everything is looked at, though nothing arrived
RETIRE = 1.0  # seconds after which what may be deleted is looked for, though there is always something to do


def main(context: ServiceContext) -> None:
    """Serve until told to stop."""
    control = start(context)
    streams = {key.at(context.job): key.name for key in (MINTED, ACKS, PHASES, PROOFS)}
    cursors = {stream: context.bus.last_id(stream) for stream in streams}
    arrived: set[str] = set()
    retired = time.monotonic()
    try:
        while not context.stop_requested():
            context.require_same_server()
            turn(control, arrived or set(streams.values()))
            if not arrived or time.monotonic() > retired + RETIRE:
                control.retire()
                retired = time.monotonic()
            context.ready(True)
            found = context.bus.read(cursors, POLL)
            cursors.update({stream: entries[-1].id for stream, entries in found.items()})
            arrived = {streams[stream] for stream in found}
        control.retire()
    finally:
        control.close()


def turn(control: Control, news: Collection[str]) -> None:
    """One step. `news`: names of the streams to look into; time passes, and work beside the loop ends, in each."""
    if PHASES.name in news:
        control.follow_phase()
    if ACKS.name in news:
        control.take_acks()
    control.look()
    if MINTED.name in news:
        control.take_minted()
    control.publish()
    if PROOFS.name in news:
        control.take_proofs()
    control.take_compared()


def start(context: ServiceContext) -> Control:
    """Take the lease and find out where the last process stood."""
    lease = context.lease("sync")
    raw = context.bus.hget(JOB.at(context.job), "spec")
    if raw is None:
        raise ValueError(f"job {context.job} has no spec")
    spec = JobSpec.model_validate_json(raw)
    of, contract = spec.versions_of(context.job), spec.contract()
    folder = context.settings.job_dir(of)
    key, store = read_key(folder), BlobStore(folder / "store")
    publisher = (Publisher if of == context.job else Pinned)(of, folder, key, contract, store)
    offers = offering(spec.transfer, folder / "store", of, key, context.settings.host)
    deltas = Deltas(store, of, key, spec.transfer.deltas)
    control = Control(context.bus, lease, context.job, spec, publisher, offers, deltas)
    control.recover()
    return control

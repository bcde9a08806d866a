"""The machine joined to the job's streams: what comes in is told to it, what it says is written at once.

Everything that one step says (orders, records, events, and the acknowledgement of what caused it) goes out in
one transaction under sync's lease, so that a crash leaves either all of it or none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from syncline.contract import events
from syncline.contract.job import JobSpec
from syncline.contract.streams import ACKS, EVENTS, GROUP_SYNC, MINTED, PHASE, SYNC
from syncline.contract.version_path import (
    RETIRED,
    Ack,
    BadManifest,
    Minted,
    SyncOrder,
    VersionId,
    VersionManifest,
    loaded_digest,
)
from syncline.runtime.bus import Bus, Value, pack, unpack
from syncline.runtime.lease import Lease
from syncline.runtime.tracing import hop
from syncline.sync import state as m
from syncline.sync.decide import held, steps
from syncline.sync.deltas import Deltas
from syncline.sync.fleet import Fleet
from syncline.sync.mail import Mail, acknowledged
from syncline.sync.pins import pinned
from syncline.sync.proofs import Proofs
from syncline.sync.publish import Publisher, Unpublishable
from syncline.sync.record import Records
from syncline.transport.transport import NotOfferable, Offering

ORDERS = 10_000  # entries kept of `sync`


class Control:
    """Sync's whole state, for one job. `recover` first, then the methods in any order."""

    def __init__(
        self,
        bus: Bus,
        lease: Lease,
        job: str,
        spec: JobSpec,
        publisher: Publisher,
        offering: Offering,
        deltas: Deltas,
    ) -> None:
        self._bus, self._lease, self._job, self._spec = bus, lease, job, spec
        self._publisher, self._offering, self._deltas = publisher, offering, deltas
        self._mail = Mail(bus, lease, job)
        self._records = Records(bus, job)
        self._fleet = Fleet(bus, job)
        self._proofs = Proofs(bus, job, spec)
        self._entries: dict[VersionId, tuple[str, Minted]] = {}  # pending ones, with their stream id
        self._kept: set[VersionId] | None = None
        self._log = logging.getLogger("syncline.sync")
        self.state = m.State(
            wait=spec.limits.activation_wait,
            seq=self._mail.last_seq(),
            scope="barrier" if spec.schedule.mode == "colocated" else "rolling",
            awake=True,
        )

    # ---- start ----
    def recover(self) -> None:
        """Go on where the last process stood: from the streams, the records and the store."""
        for key in (MINTED, ACKS):
            self._bus.ensure_group(key.at(self._job), GROUP_SYNC)
        self.follow_phase()
        records = {record.version: record for record in self._records.load()}
        pending = self._mail.pending(MINTED, Minted)
        waiting = {minted.version for _, minted in pending}
        known = [v for v, r in records.items() if r.state != "minted" and v not in waiting]
        self.state = msgspec.structs.replace(self.state, newest=max(known, default=None))
        stored = set(self._publisher.store.manifests())
        for version, record in records.items():
            if record.state in ("published", "active") and version not in stored:
                self._records.retired(version, time.time())  # the last process died between the two
        for id, minted in sorted(pending, key=lambda pair: pair[1].version):
            state = records[minted.version].state if minted.version in records else "minted"
            if state in ("retired", "failed"):  # only its entry and export are left
                self._write(acknowledged(MINTED.at(self._job), id))
                self._publisher.drop_export(minted)
                continue
            self._hear(id, minted)
            try:
                manifest = self._publisher.published(minted)
                if manifest is not None:
                    self._offering.offer(minted.version)
            except (BadManifest, NotOfferable) as error:
                self._tell(m.Broken(version=minted.version, reason=str(error)))
                continue
            if manifest is not None and minted.version in self._entries:
                self._published(minted, manifest, complete=state == "active")
        self._take_acks(self._mail.pending(ACKS, Ack))

    def close(self) -> None:
        """End what goes on beside the loop, and offer nothing any longer."""
        self._deltas.close()
        self._offering.close()

    # ---- what comes in ----
    def follow_phase(self) -> None:
        """Tell the machine which placement is wanted."""
        raw = self._bus.get(PHASE.at(self._job))
        if raw is None:
            return
        phase = unpack(raw, events.Phase)
        scope: m.Scope = "barrier" if phase.mode == "colocated" else "rolling"
        if (scope, phase.rollout == "awake") != (self.state.scope, self.state.awake):
            self._tell(m.Wanted(scope=scope, awake=phase.rollout == "awake"))

    def take_acks(self) -> None:
        """Tell the machine what workers answered since the last call."""
        self._take_acks(self._mail.new(ACKS, Ack))

    def look(self) -> None:
        """Tell the machine who lives, and that time has passed."""
        known = {worker.name: worker.incarnation for worker in self.state.workers.values()}
        self._tell(*self._fleet.look(known, time.monotonic()), m.Tick())

    def take_minted(self) -> None:
        """Hear of new versions."""
        for id, minted in self._mail.new(MINTED, Minted):
            self._hear(id, minted)

    def publish(self) -> None:
        """Convert and publish the newest version if it is not yet, and may be."""
        proven = any(offer.ended == "active" for offer in self.state.offers.values())
        for version in self._proofs.next(self.state):
            minted = self._entries[version][1]
            record = self._records.of(minted)
            try:
                manifest = self._publisher.publish(minted, record, proven=proven)
                self._offering.offer(version)
            except (Unpublishable, NotOfferable) as error:
                self._log.error("version %s cannot be published: %s", version, error)
                self._tell(m.Broken(version=version, reason=str(error)))
                self._kept = None  # what was stored of it goes: on a full disk the next one needs the room
            else:
                self._published(minted, manifest, complete=False)

    def take_proofs(self) -> None:
        """Tell the machine what level 6 of the ladder says of versions that must pass it."""
        if told := self._proofs.told():
            self._tell(*told)

    def take_compared(self) -> None:
        """Record what published versions changed, and offer their deltas."""
        for compared in self._deltas.done():
            for problem in compared.problems:
                self._log.warning("deltas of version %s: %s", compared.version, problem)
                self._kept = None  # nothing names what was stored of them
            self._records.compared(compared)
            try:
                if compared.indexed:
                    self._offering.offer(compared.version)
            except NotOfferable as error:
                self._log.warning("deltas of version %s: %s", compared.version, error)
        self._write(self._records.commands())

    def retire(self) -> None:
        """Delete versions beyond retention that nobody serves, stages or builds on, and blobs of no manifest.

        Raises `LeaseLost`, with nothing deleted, in a process that was overtaken while it stood still.
        """
        if self._publisher.borrowed:
            return
        store = self._publisher.store
        manifests = store.manifests()
        bases = {minted.base for _, minted in self._entries.values() if minted.base is not None}
        keep = set(manifests[-self._spec.retention.versions :]) | held(self.state) | bases
        keep |= pinned(self._bus, self._job) & set(manifests)
        if keep == self._kept:
            return
        self._lease.renew()  # what is deleted is no transaction that the lease could guard
        if self._kept is None:
            self._collect(set(manifests))  # what is left of a version that was not converted to its end
        self._kept = keep
        for version in [v for v in manifests if v not in keep]:
            parent = self._records.traceparent(version)
            with hop(RETIRED, parent=parent, job=self._job, version=version) as retired:
                retired.set(freed_bytes=self._collect(set(store.manifests()) - {version}))
            self._records.retired(version, time.time())
        self._offering.retire()
        self._write(self._records.commands())

    def _collect(self, keep: set[VersionId]) -> int:
        """`store.collect`, or nothing while a kept manifest cannot be read: which blobs it names is not known."""
        try:
            return self._publisher.store.collect(keep, self._deltas.spare)
        except (BadManifest, OSError) as error:
            self._log.error("no blob is deleted: %s", error)
            return 0

    # ---- telling the machine ----
    def _hear(self, id: str, minted: Minted) -> None:
        """Tell the machine of a minted version, whose entry stays pending as long as it may be needed."""
        if minted.version in self._entries:
            if self._entries[minted.version][1].files != minted.files:
                self._log.error(
                    "version %s came twice with different files; the first stands", minted.version
                )
            self._write(acknowledged(MINTED.at(self._job), id))
            return
        self._records.of(minted)
        self._entries[minted.version] = (id, minted)
        self._tell(m.Minted(version=minted.version))

    def _take_acks(self, answers: Sequence[tuple[str, Ack]]) -> None:
        if answers:
            causes = [command for id, _ in answers for command in acknowledged(ACKS.at(self._job), id)]
            self._tell(*(m.Acked(ack=ack) for _, ack in answers), causes=causes)

    def _published(self, minted: Minted, manifest: VersionManifest, *, complete: bool) -> None:
        record = self._records.of(minted)
        if record.published is None:
            record.state, record.published, record.digest = "published", time.time(), manifest.digest()
            record.representation, record.nbytes = manifest.representation, manifest.nbytes()
        self._records.publish(record)
        published = m.Published(
            version=minted.version,
            digest=manifest.digest(),
            loaded=loaded_digest(manifest.tensors),
            canaries=bool(minted.canaries),
            tolerance=self._publisher.contract.convert.tolerance,
            complete=complete,
            proof=self._proofs.needed,
        )
        self._tell(published)
        if self._proofs.needed and not complete:
            self._proofs.want(minted, published.digest, published.tolerance, self.state)
        self._publisher.drop_export(minted)
        if record.changed_share is None and not self._publisher.borrowed:
            self._deltas.start(manifest)

    def _tell(self, *events: m.Event, causes: Sequence[Sequence[Value]] = ()) -> None:
        """One step of the machine, written with the acknowledgements of its `causes`."""
        self.state, effects = steps(self.state, events, time.monotonic())
        commands = [command for effect in effects for command in self._said(effect)]
        needed = {*self.state.pending, *self.state.offers}  # of others nobody asks for anything again
        gone = [self._entries.pop(version) for version in self._entries.keys() - needed]
        for id, _ in gone:
            commands += acknowledged(MINTED.at(self._job), id)
        self._write([*self._records.commands(), *commands, *causes])
        for _, minted in gone:
            self._publisher.drop_export(minted)

    # ---- writing what it says ----
    def _said(self, effect: m.Effect) -> list[list[Value]]:
        now = time.time()
        match effect:
            case m.Order():
                self._log.info("%s %s to %s", effect.order, effect.version, ", ".join(effect.workers))
                order = pack(self._order(effect))
                return [["XADD", SYNC.at(self._job), "MAXLEN", "~", ORDERS, "*", "m", order]]
            case m.Reached():
                if effect.what == "out":
                    self._log.warning(
                        "worker %s is out with %s: %s", effect.worker, effect.version, effect.reason
                    )
                self._records.reached(effect, now)
            case m.Ended():
                self._log.info("version %s: %s %s", effect.version, effect.how, effect.reason)
                self._records.ended(effect, now)
                event = self._proofs.event(effect, self.state)
                return [] if event is None else [["XADD", EVENTS.at(self._job), "*", "m", pack(event)]]
            case m.Refused():
                self._log.warning("refused: %s", effect.reason)
        return []

    def _order(self, order: m.Order) -> SyncOrder:
        minted = self._entries[order.version][1]
        stage = order.order == "stage"
        return SyncOrder(
            order=order.order,
            version=order.version,
            digest=order.digest,
            workers=order.workers,
            seq=order.seq,
            traceparent=minted.traceparent,
            canaries=minted.canaries if stage else (),
            tolerance=self._publisher.contract.convert.tolerance if stage else 0.0,
            source=self._offering.source(order.version, order.workers, order.seq) if stage else "",
        )

    def _write(self, commands: Sequence[Sequence[Value]]) -> None:
        if commands:
            self._lease.transact(commands)

"""The versions' records, as the gateway shows them: a projection of what the machine says and conversion did.

Sync is their one writer after minting. Records are kept in memory, changed there and written with the orders
that belong to them in one transaction; times are wall-clock unix seconds.
"""

from __future__ import annotations

import msgspec

from syncline.contract.streams import VERSIONS
from syncline.contract.version_path import Minted, VersionId, VersionRecord, VersionState, WorkerPath
from syncline.runtime.bus import BadMessage, Bus, Value
from syncline.sync.deltas import Compared
from syncline.sync.state import Ended, Reached

LATEST = "latest"
OPEN: tuple[VersionState, ...] = ("minted", "converted", "published", "active")


class Records:
    """All records of one job that may still change."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus = bus
        self._key = VERSIONS.at(job)
        self._held: dict[VersionId, VersionRecord] = {}
        self._changed: set[VersionId] = set()
        self._latest: VersionId | None = None

    def load(self) -> list[VersionRecord]:
        """Read all of them, oldest first. Raises `BadMessage`."""
        fields = self._bus.hgetall(self._key)
        fields.pop(LATEST.encode(), None)
        found = sorted((self._decoded(text) for text in fields.values()), key=lambda record: record.version)
        self._held = {record.version: record for record in found}
        return found

    def of(self, minted: Minted) -> VersionRecord:
        """The record of a minted version, made from the message if the trainer has not written it yet."""
        record = self._get(minted.version)
        if record is None:
            record = VersionRecord(
                version=minted.version,
                parent=minted.parent,
                optimizer_step=minted.optimizer_step,
                contract=minted.contract,
                state="minted",
                traceparent=minted.traceparent,
                minted=minted.minted_at,
            )
            self._held[minted.version] = record
            self._changed.add(minted.version)
        return record

    def change(self, record: VersionRecord) -> VersionRecord:
        """`record`, whose fields the caller changes: it is written with the next commands."""
        self._held[record.version] = record
        self._changed.add(record.version)
        return record

    def traceparent(self, version: VersionId) -> str | None:
        """Context of the version's trace; None: not known."""
        record = self._get(version)
        return record.traceparent or None if record is not None else None

    def publish(self, record: VersionRecord) -> None:
        """`record` is the newest published version from now on."""
        self.change(record)
        self._latest = record.version

    def compared(self, compared: Compared) -> None:
        """What the version changed is known."""
        record = self._get(compared.version)
        if record is not None:
            self.change(record).changed_bytes = compared.changed_bytes
            record.changed_share, record.delta_bytes = compared.changed_share, compared.delta_bytes

    def reached(self, effect: Reached, at: float) -> None:
        """Write down how far a worker got."""
        record = self._get(effect.version)
        if record is None:
            return  # a worker left a version of before this job's records
        path = self.change(record).workers.setdefault(effect.worker, WorkerPath())
        ack = effect.ack
        match effect.what:
            case "staged":
                path.staged = at
            case "verified":
                path.verified, path.verdict, path.reason = at, effect.verdict, ""
                path.staged = at if path.staged is None else path.staged
            case "active":
                path.active, path.left = at, None
                path.pause_ms = None if ack is None else ack.pause_ms
            case "left":
                path.left = at
            case "out":
                path.reason = effect.reason
        if ack is not None and effect.what == "verified" and ack.trace is not None:
            record.rollout_trace = ack.trace
        if ack is not None and ack.pulled is not None:
            path.pulled = ack.pulled
        if ack is not None and effect.what in ("verified", "out"):
            path.loaded_digest, path.canary_gap = ack.loaded_digest, ack.canary_gap

    def ended(self, effect: Ended, at: float) -> None:
        """Write down how a version's activation ended."""
        record = self._get(effect.version)
        if record is None or record.state not in OPEN:
            return
        if effect.how == "superseded" and record.active is not None:
            return  # an old minted message told again
        self.change(record)
        match effect.how:
            case "active":
                record.state = "active"
                record.active = at if record.active is None else record.active
            case "superseded":
                record.state, record.retired, record.reason = "retired", at, f"superseded: {effect.reason}"
            case "failed" | "refused":
                record.state, record.reason = "failed", effect.reason

    def retired(self, version: VersionId, at: float) -> None:
        """The version's manifest is gone."""
        record = self._get(version)
        if record is not None and record.retired is None:
            self.change(record).retired = at
            record.state = "failed" if record.state == "failed" else "retired"

    def commands(self) -> list[list[Value]]:
        """Raw commands that write what has changed since the last call."""
        fields: list[Value] = []
        for version in sorted(self._changed):
            fields += [str(version), msgspec.json.encode(self._held[version])]
        if self._latest is not None:
            fields += [LATEST, str(self._latest)]
        done = [v for v in self._changed if self._held[v].retired is not None and _quiet(self._held[v])]
        for version in done:
            del self._held[version]
        self._changed.clear()
        self._latest = None
        return [["HSET", self._key, *fields]] if fields else []

    def _get(self, version: VersionId) -> VersionRecord | None:
        if version not in self._held:
            text = self._bus.hget(self._key, str(version))
            if text is None:
                return None
            self._held[version] = self._decoded(text)
        return self._held[version]

    def _decoded(self, text: bytes) -> VersionRecord:
        try:
            return msgspec.json.decode(text, type=VersionRecord)
        except msgspec.MsgspecError as error:
            raise BadMessage(f"{self._key}: {error}") from None


def _quiet(record: VersionRecord) -> bool:
    """Whether no worker serves the version any more: nothing will change."""
    return all(path.active is None or path.left is not None for path in record.workers.values())

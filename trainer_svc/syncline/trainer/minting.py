"""Minting: from the engine's weights to a version that sync can take. See "The path of a version", step 1."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.contract import events
from syncline.contract.streams import EVENTS, MINTED, VERSIONS
from syncline.contract.version_path import MINTED as MINTED_HOP
from syncline.contract.version_path import Minted, VersionId, VersionRecord, parse_version
from syncline.runtime import tracing
from syncline.runtime.bus import Bus, pack
from syncline.runtime.lease import Lease
from syncline.trainer import canaries
from syncline.trainer.engine import Sample, TrainerEngine


class Mint:
    """Makes versions of one job.

    lease      of the job's trainer: a version is announced under it or not at all
    prefixes   the canaries' samples
    adapter    the base is frozen: once a version that brought it is published, later ones bring the adapter alone
    """

    def __init__(
        self,
        bus: Bus,
        lease: Lease,
        job: str,
        folder: Path,
        contract: str,
        prefixes: list[Sample],
        adapter: bool = False,
    ) -> None:
        self._bus, self._lease, self._job = bus, lease, job
        self._folder, self._contract = folder, contract
        self._prefixes = prefixes
        self._adapter = adapter
        self._newest: Minted | None = None
        self._whole: VersionId | None = None  # newest version of this process that brought the base

    def mint(
        self,
        engine: TrainerEngine,
        version: VersionId,
        parent: VersionId | None,
        traces: Sequence[str],
        trajectories: int,
    ) -> str:
        """Export the present weights as `version` and hand it to sync; returns the hop's traceparent.

        traces   contexts of the trajectories that the version was trained on

        Raises `LeaseLost`, with nothing announced.
        """
        with tracing.hop(
            MINTED_HOP,
            links=traces,
            job=self._job,
            version=version,
            optimizer_step=version.number,
            trajectories=trajectories,
        ) as hop:
            hop.set(parent=parent)  # an argument of that name would be the trace's parent
            base = self._base()
            files = engine.export(self._folder / "export" / str(version), base=base is None)
            self._whole = version if base is None else self._whole
            minted = Minted(
                job=self._job,
                version=version,
                parent=parent,
                optimizer_step=version.number,
                contract=self._contract,
                artefact=f"export/{version}",
                files=files,
                canaries=canaries.score(engine, self._prefixes),
                traceparent=hop.traceparent,
                minted_at=time.time(),
                base=base,
            )
            self._newest = minted
            self._announce(minted)
        return hop.traceparent

    def _base(self) -> VersionId | None:
        """The version that a new one may build on: this process's own, as long as its manifest lists the base."""
        if not self._adapter or self._whole is None:
            return None
        raw = self._bus.hget(VERSIONS.at(self._job), str(self._whole))
        if raw is None:
            return None
        record = msgspec.json.decode(raw, type=VersionRecord)
        return self._whole if record.state in ("published", "active") else None

    def _announce(self, minted: Minted) -> None:
        """All at once: the record is there when sync reads of the version and the scheduler hears of it."""
        record = VersionRecord(
            version=minted.version,
            parent=minted.parent,
            optimizer_step=minted.optimizer_step,
            contract=minted.contract,
            state="minted",
            traceparent=minted.traceparent,
            minted=minted.minted_at,
        )
        told = events.Minted(version=minted.version)
        self._lease.transact(
            [
                ("HSET", VERSIONS.at(self._job), str(minted.version), msgspec.json.encode(record)),
                ("XADD", MINTED.at(self._job), "*", "m", pack(minted)),
                ("XADD", EVENTS.at(self._job), "*", "m", pack(told)),
            ]
        )

    def remind(self, version: VersionId) -> None:
        """Announce `version`, the newest, again if Redis has forgotten it."""
        if self._newest is None or self._newest.version != version:
            return
        if self._bus.hget(VERSIONS.at(self._job), str(version)) is None:
            self._announce(self._newest)

    def known(self) -> list[VersionId]:
        """Versions that Redis remembers, oldest first."""
        fields = self._bus.hgetall(VERSIONS.at(self._job))
        return sorted(parse_version(name.decode()) for name in fields if name != b"latest")

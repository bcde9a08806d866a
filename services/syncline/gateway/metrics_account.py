"""What one job's streams amount to, added up as they grow: `Account`. Each scrape reads only what is new.

An account holds nothing that its streams do not: a gateway that starts adds up from their beginning and goes on with
the same sums, so no counter falls when one gateway takes another's place. Times of phases are the Redis server's
(entry ids), so that no two machines' clocks are compared.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import msgspec

from syncline.contract.diagnosis import Diagnostics
from syncline.contract.events import Phase, UpdateMetrics
from syncline.contract.streams import DIAGNOSTICS, METRICS, PHASES, VERSIONS
from syncline.contract.version_path import VersionRecord, WorkerPath
from syncline.gateway import metrics_names as names
from syncline.gateway.metrics_sheet import Tally
from syncline.runtime.bus import BadMessage, Bus, Entry, unpack

_PAGE = 1000
_SETTLED = ("retired", "failed")
_IN_USE = 64  # ended versions that are remembered: a worker may serve one still, or say so a heartbeat late
STAGES = ("converted", "published", "staged", "verified", "active")


class Versions:
    """Sums over version records. One that is settled is added once; an open one is read again at each scrape."""

    def __init__(self) -> None:
        self.stages = {stage: Tally(names.VERSION_SECONDS) for stage in STAGES}
        self.pauses, self.pulls = Tally(names.SYNC_PAUSE), Tally(names.PULL_SECONDS)
        self.bytes: Counter[str] = Counter()
        self.failed = 0

    def copy(self) -> Versions:
        """Another one that grows by itself."""
        made = Versions()
        made.stages = {stage: tally.copy() for stage, tally in self.stages.items()}
        made.pauses, made.pulls = self.pauses.copy(), self.pulls.copy()
        made.bytes, made.failed = self.bytes.copy(), self.failed
        return made

    def add(self, record: VersionRecord) -> None:
        """Count what the version has passed."""
        self.failed += record.state == "failed"
        self.bytes["whole"] += record.nbytes
        self.bytes["new"] += record.new_bytes
        for path in record.workers.values():
            if path.pause_ms is not None:
                self.pauses.add(path.pause_ms / 1000)
            if path.pulled is not None:
                self.pulls.add(path.pulled.seconds)
                for kind in ("full", "deltas", "held"):
                    self.bytes[kind] += msgspec.structs.asdict(path.pulled)[kind]
        for stage, seconds in reached(record):
            self.stages[stage].add(seconds)


def reached(record: VersionRecord, worker: WorkerPath | None = None) -> Iterator[tuple[str, float]]:
    """(stage, seconds from minting), of all workers or of one. Clocks of two machines may differ: at least 0."""
    if record.minted is None:
        return
    paths = list(record.workers.values()) if worker is None else [worker]
    at = [("converted", record.converted), ("published", record.published)]
    at += [(stage, _when(path, stage)) for path in paths for stage in STAGES[2:]]
    for stage, when in at:
        if when is not None:
            yield stage, max(0.0, when - record.minted)


def _when(path: WorkerPath, stage: str) -> float | None:
    """When the worker passed `stage`."""
    when: dict[str, float | None] = {"staged": path.staged, "verified": path.verified, "active": path.active}
    return when[stage]


class Account:
    """One job's sums."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._cursors = {METRICS.at(job): "0", PHASES.at(job): "0", DIAGNOSTICS.at(job): "0"}
        # updates
        self.sums: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.lag, self.update_seconds = Tally(names.LAG), Tally(names.UPDATE_SECONDS)
        self.waited = Tally(names.BATCH_WAIT)
        self.update: UpdateMetrics | None = None
        # phases
        self.phase: Phase | None = None
        self._since = 0.0
        self.phases: Counter[tuple[str, str]] = Counter()
        self._spent: Counter[tuple[str, str]] = Counter()
        self._awake: Counter[str] = Counter()
        # precision
        self.measured: Diagnostics | None = None
        # versions
        self._versions = Versions()
        self._settled: set[bytes] = set()
        self.open: dict[str, VersionRecord] = {}
        self.newest: VersionRecord | None = None
        self.ended: deque[VersionRecord] = deque(maxlen=_IN_USE)
        self.compared: VersionRecord | None = None  # the newest of those whose `changed_share` is known

    def read(self, bus: Bus) -> None:
        """Add what is new. Raises `BadMessage` for what cannot be read."""
        while True:
            found = bus.read(self._cursors, None, _PAGE)
            for key, entries in found.items():
                for entry in entries:
                    self._add(key, entry)
                self._cursors[key] = entries[-1].id
            if all(len(entries) < _PAGE for entries in found.values()):
                break
        self._read_versions(bus)

    def spent(self, now: float) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
        """Seconds by (mode, phase), and seconds ordered awake by side, up to `now` of the Redis server's clock.

        Of those of side rollout, `counted` had a known number of workers, which were `workers` seconds in all.
        """
        spent, awake = self._spent.copy(), self._awake.copy()
        self._pass_time(now, spent, awake)
        return dict(spent), dict(awake)

    def versions(self) -> Versions:
        """All versions, the open ones as they stand."""
        found = self._versions.copy()
        for record in self.open.values():
            found.add(record)
        return found

    # ---- one by one ----------------------------------------------------------------------------------------
    def _add(self, key: str, entry: Entry) -> None:
        if key == METRICS.at(self.job):
            self._add_update(unpack(entry, UpdateMetrics))
        elif key == PHASES.at(self.job):
            self._add_phase(unpack(entry, Phase), int(entry.id.partition("-")[0]) / 1000)
        else:
            self.measured = unpack(entry, Diagnostics)
            self.sums["probed"] += self.measured.tokens
            self.sums["alarms"] += len(self.measured.alarms)

    def _add_update(self, made: UpdateMetrics) -> None:
        self.update = made
        self.sums["updates"] += 1
        self.sums["skipped"] += made.skipped
        self.sums["tokens"] += made.tokens
        self.sums["trajectories"] += made.trajectories
        self.sums["unscored"] += made.unscored
        self.sums["over_lag"] += made.expired
        for why, count in (
            ("masked", made.masked_tokens),
            ("outside", made.outside),
            ("clamped", made.clamped),
        ):
            self.cut[why] += count
        self.update_seconds.add(made.seconds)
        self.waited.add(made.waited)
        for lag, trajectories in made.lag_counts.items():
            self.lag.add(float(lag), trajectories)

    def _add_phase(self, phase: Phase, at: float) -> None:
        self._pass_time(at, self._spent, self._awake)
        self.phase, self._since = phase, at
        self.phases[phase.mode, phase.phase] += 1

    def _pass_time(self, now: float, spent: Counter[tuple[str, str]], awake: Counter[str]) -> None:
        if self.phase is None or self.phase.phase == "done":
            return
        seconds = max(0.0, now - self._since)
        spent[self.phase.mode, self.phase.phase] += seconds  # type: ignore[assignment]
        for side, placement in (("rollout", self.phase.rollout), ("trainer", self.phase.trainer)):
            awake[side] += seconds if placement == "awake" else 0.0  # type: ignore[assignment]
        if self.phase.rollout == "awake":  # of those workers that the phase counted
            awake["counted"] += seconds if self.phase.workers else 0.0  # type: ignore[assignment]
            awake["workers"] += seconds * self.phase.workers  # type: ignore[assignment]

    def _read_versions(self, bus: Bus) -> None:
        key = VERSIONS.at(self.job)
        fields = [name for name in bus.call("HKEYS", key) if name not in self._settled and name != b"latest"]
        self.open = {}
        ended: list[tuple[bytes, VersionRecord]] = []
        for name, raw in zip(fields, bus.hmget(key, fields), strict=True):
            if raw is None:
                continue
            try:
                record = msgspec.json.decode(raw, type=VersionRecord)
            except msgspec.MsgspecError as error:
                raise BadMessage(f"{key} {name.decode()}: {error}") from None
            if self.newest is None or record.version >= self.newest.version:
                self.newest = record
            if record.changed_share is not None and (
                self.compared is None or record.version >= self.compared.version
            ):
                self.compared = record
            if record.state in _SETTLED:
                ended.append((name, record))
            else:
                self.open[str(record.version)] = record
        for name, record in ended:
            if record is self.newest:  # what it changed may be compared still
                self.open[str(record.version)] = record
            else:
                self._settled.add(name)
                self._versions.add(record)
                self.ended.append(record)

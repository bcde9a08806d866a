"""All that is known of one trajectory, fetched from wherever it lies now: ledger, stream, segment, scores."""

from __future__ import annotations

from typing import Literal

import msgspec

from syncline.contract.streams import REWARDS, TRAJECTORIES
from syncline.contract.token_path import Reward, Trajectory, parse_trajectory_id, trajectory_id
from syncline.contract.trajectory_wire import decode
from syncline.contract.version_path import VersionId
from syncline.gateway.errors import Refusal
from syncline.gateway.records import JobRecord
from syncline.gateway.segment_index import SegmentIndex
from syncline.gateway.shapes import TrajectoryState
from syncline.runtime import segments
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.ledger import Ledger, LedgerEntry
from syncline.runtime.segment_probes import ProbedToken, probes_path, read_probes


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory with its record. None: not known, or not reached yet."""

    record: Trajectory
    state: TrajectoryState
    reason: str
    reward: Reward | None
    update: int | None  # that claimed or consumed it
    lag: int | None
    advantage: float | None
    score: segments.ScoreRow | None
    minted: VersionId | None  # the version that `update` made
    probed: tuple[ProbedToken, ...] = ()  # one per sampled token, in order; empty: not probed


def ledger_of(bus: Bus, record: JobRecord) -> Ledger:
    """The job's ledger, for looking."""
    return Ledger.under(bus, record.id, record.spec)


def place_of(job: str, trajectory: str) -> tuple[int, int] | None:
    """Group and index that the id names, or None for an id that is none of this job's."""
    try:
        _, group, index = parse_trajectory_id(trajectory)
    except ValueError:
        return None
    small = group < 2**53 and index < 2**31
    return (group, index) if small and trajectory_id(job, group, index) == trajectory else None


def gather(bus: Bus, job: JobRecord, trajectory: str) -> Gathered:
    """Raises `Refusal`: 404 unknown, 409 while there is no record yet, 410 when the record is gone."""
    if place_of(job.id, trajectory) is None:
        raise unknown_trajectory()
    entry = ledger_of(bus, job).entry(trajectory) if job.recorded else None
    if entry is not None and entry.state == "buffered":
        found = _from_stream(bus, job, entry)
        if found is not None:
            return found
    update = entry.update if entry is not None else None
    if update is None:
        member = SegmentIndex(job.folder).find(trajectory) if job.folder.is_dir() else None
        update = None if member is None else member.update
    found = None if update is None else _from_segment(job, trajectory, update, entry)
    if found is not None:
        return found
    if entry is None:
        raise unknown_trajectory()
    raise _without_record(entry)


def unknown_trajectory() -> Refusal:
    """404; the same for an id that names nothing and for text that is no id."""
    return Refusal(404, "not-found", "there is no such trajectory in this job")


def _without_record(entry: LedgerEntry) -> Refusal:
    if entry.state == "running":
        where = "nobody has begun it" if entry.worker is None else f"on {entry.worker}"
        detail = (
            f"the trajectory is running (attempt {entry.attempt}, {where}): its record comes when it ends"
        )
        return Refusal(409, "no-record-yet", detail, state=entry.state)
    why = f" ({entry.reason})" if entry.reason else ""
    return Refusal(
        410, "gone", f"the trajectory ended as {entry.state}{why}; its record is gone", state=entry.state
    )


def _from_stream(bus: Bus, job: JobRecord, entry: LedgerEntry) -> Gathered | None:
    """A record that waits for its update. None: it left the stream a moment ago."""
    if entry.stream_id is None:
        return None
    entries = bus.range(TRAJECTORIES.at(job.id), entry.stream_id, entry.stream_id)
    if not entries:
        return None
    record = decode(entries[0].fields)
    raw = bus.hget(REWARDS.at(job.id), entry.trajectory)
    claims = ledger_of(bus, job).claims().values()
    claim = next((c for c in claims if entry.trajectory in c.trajectories), None)
    return Gathered(
        record=record,
        state=entry.state,
        reason=entry.reason,
        reward=None if raw is None else unpack(raw, Reward),
        update=None if claim is None else claim.update,
        lag=None if claim is None else claim.version - record.oldest.number,
        advantage=None,
        score=None,
        minted=None,
    )


def _from_segment(job: JobRecord, trajectory: str, update: int, entry: LedgerEntry | None) -> Gathered | None:
    folder = job.folder / "segments"
    path = segments.segment_path(folder, update)
    row = segments.read_one(path, trajectory) if path.is_file() else None
    if row is None:
        return None
    scored = segments.scores_path(folder, update)
    scores = segments.read_scores(scored, trajectory) if scored.is_file() else None
    rows = () if scores is None else scores.rows
    used = row.use == "train"
    table = probes_path(folder, update)
    probed = read_probes(table, trajectory) if table.is_file() else []
    return Gathered(
        record=row.trajectory,
        state=entry.state if entry is not None else _state(row.use, stepped=scores is not None),
        reason=row.why,
        reward=row.reward,
        update=update,
        lag=row.lag,
        advantage=row.advantage if used else None,
        score=rows[0] if rows else None,
        minted=None if scores is None else scores.minted,
        probed=tuple(probed),
    )


def _state(use: Literal["train", "filtered"], *, stepped: bool) -> TrajectoryState:
    """What the files alone say: a segment is written before its step, scores after it."""
    if use == "filtered":
        return "filtered"
    return "trained" if stepped else "buffered"

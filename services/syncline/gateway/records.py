"""Job records: from Redis while it knows the job, from the run folder afterwards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from syncline.contract.drawn import PromptAccount
from syncline.contract.evaluation import Evaluation, decoded
from syncline.contract.events import JobState, Phase, Pool, UpdateMetrics, Wait
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVALUATIONS, JOB, METRICS, PHASE
from syncline.gateway.shapes import JobBrief, JobView, State
from syncline.runtime.bus import BadMessage, Bus, unpack
from syncline.runtime.evaluations import kept
from syncline.runtime.settings import Settings


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a job. `recorded`: Redis has it; else all comes from its folder."""

    id: str
    spec: JobSpec
    spec_hash: str
    state: State
    reason: str
    waits: tuple[Wait, ...]
    created: float | None
    started: float | None
    ended: float | None
    recorded: bool
    folder: Path
    alarm: str = ""
    sandbox: str = ""
    prompts: PromptAccount = PromptAccount()  # empty, too, for a job that is not recorded
    pool: Pool | None = None  # None: the job has not begun, or is not recorded
    update: int = 0  # updates made, for a job that is not recorded; Redis says it otherwise


class _Alarms(msgspec.Struct, frozen=True):
    alarms: tuple[str, ...] = ()


class _Summary(msgspec.Struct, frozen=True):
    """The part of `summary.json` that a job's state needs."""

    state: JobState
    updates: int
    diagnostics: _Alarms = _Alarms()


def find(bus: Bus, settings: Settings, job: str) -> JobRecord | None:
    """The record of a well-formed job id, or None. Raises `BadMessage` for one that cannot be read."""
    return found_in(settings, job, bus.hgetall(JOB.at(job)))


def found_in(settings: Settings, job: str, fields: dict[bytes, bytes]) -> JobRecord | None:
    """`find`, the JOB hash having been read. One without a spec may be a forgotten job's: its folder knows it then."""
    if b"spec" in fields:
        return from_fields(settings, job, fields)
    return _from_folder(settings, job) or from_fields(settings, job, fields)


def from_fields(settings: Settings, job: str, fields: dict[bytes, bytes]) -> JobRecord | None:
    """The record that the JOB hash holds, None for an empty one. Raises `BadMessage` naming the key and field."""
    if not fields:
        return None
    return JobRecord(
        id=job,
        spec=spec_of(job, fields),
        spec_hash=_text(job, b"spec_hash", _there(job, fields, b"spec_hash")),
        state=state_of(job, fields),
        reason=_text(job, b"reason", fields.get(b"reason", b"")),
        waits=_decoded(f"{JOB.at(job)} waits", fields.get(b"waits") or b"[]", tuple[Wait, ...]),
        created=time_of(job, fields, b"created"),
        started=time_of(job, fields, b"started"),
        ended=time_of(job, fields, b"ended"),
        recorded=True,
        folder=settings.job_dir(job),
        alarm=_text(job, b"alarm", fields.get(b"alarm", b"")),
        sandbox=_text(job, b"sandbox", fields.get(b"sandbox", b"")),
        pool=_decoded(f"{JOB.at(job)} pool", fields.get(b"pool") or b"null", Pool | None),
        prompts=_decoded(f"{JOB.at(job)} prompts", fields.get(b"prompts") or b"{}", PromptAccount),
    )


def _from_folder(settings: Settings, job: str) -> JobRecord | None:
    folder = settings.job_dir(job)
    path = folder / "spec.json"
    if not path.is_file():
        return None
    spec = _spec(f"spec.json of {job}", path.read_bytes())
    summary = folder / "summary.json"
    told = _decoded(f"summary.json of {job}", summary.read_bytes(), _Summary) if summary.is_file() else None
    return JobRecord(
        id=job,
        spec=spec,
        spec_hash=spec.hash(),
        state=told.state if told else "unrecorded",
        reason="" if told else "Redis no longer knows this job and its folder has no summary.json",
        waits=(),
        created=path.stat().st_mtime,
        started=None,
        ended=summary.stat().st_mtime if told else None,
        recorded=False,
        folder=folder,
        alarm=told.diagnostics.alarms[-1] if told and told.diagnostics.alarms else "",
        update=told.updates if told else 0,
    )


def _spec(where: str, text: bytes) -> JobSpec:
    try:
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        raise BadMessage(
            f"{where}: {error.error_count()} problems, the first at {error.errors()[0]['loc']}"
        ) from None


def _decoded(where: str, text: bytes, type: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.MsgspecError as error:
        raise BadMessage(f"{where}: {error}") from None


def spec_of(job: str, fields: dict[bytes, bytes]) -> JobSpec:
    """The spec in the JOB hash. Raises `BadMessage` for none, or one that is not valid."""
    return _spec(f"{JOB.at(job)} spec", _there(job, fields, b"spec"))


def state_of(job: str, fields: dict[bytes, bytes]) -> JobState:
    """The state in the JOB hash. Raises `BadMessage` for none, or none that there is."""
    text = _text(job, b"state", _there(job, fields, b"state"))
    try:
        told: JobState = msgspec.convert(text, JobState)
    except msgspec.ValidationError as error:
        raise BadMessage(f"{JOB.at(job)} state: {error}") from None
    return told


def time_of(job: str, fields: dict[bytes, bytes], name: bytes) -> float | None:
    """Wall-clock unix seconds in a field of the JOB hash, None: not yet. Raises `BadMessage` for what is no time."""
    text = fields.get(name)
    if not text:
        return None
    try:
        told = float(text)
    except ValueError:
        told = math.nan
    if not math.isfinite(told):
        raise BadMessage(f"{JOB.at(job)} {name.decode()}: {text[:40]!r} is no time")
    return told


def _there(job: str, fields: dict[bytes, bytes], name: bytes) -> bytes:
    try:
        return fields[name]
    except KeyError:
        raise BadMessage(f"{JOB.at(job)} {name.decode()}: is missing") from None


def _text(job: str, name: bytes, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise BadMessage(f"{JOB.at(job)} {name.decode()}: {error}") from None


_Told = TypeVar("_Told", Phase, UpdateMetrics)


# ---- as people see it -------------------------------------------------------------------------------------
class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a recorded job stands now."""

    phase: Phase | None
    last: UpdateMetrics | None
    evaluations: tuple[Evaluation, ...] = ()


Replies = tuple[bytes | None, list[Any], list[bytes]]
"""What Redis answered of one job: its phase, its newest metrics, its evaluations."""


def replies_of(bus: Bus, jobs: list[str]) -> dict[str, Replies]:
    """Of each job, in one round trip; nothing is decoded yet, so that one job's fault stays its own."""
    commands = [
        c
        for job in jobs
        for c in (
            ("GET", PHASE.at(job)),
            ("XREVRANGE", METRICS.at(job), "+", "-", "COUNT", 1),
            ("HVALS", EVALUATIONS.at(job)),
        )
    ]
    replies = bus.many(commands) if commands else []
    return dict(zip(jobs, zip(replies[::3], replies[1::3], replies[2::3], strict=True), strict=True))


def progress_of(job: str, replies: Replies) -> Progress:
    """What the replies tell. Raises `BadMessage` naming the key that cannot be read."""
    phase, rows, told = replies
    return Progress(
        phase=_unpacked(PHASE.at(job), phase, Phase) if phase else None,
        last=_unpacked(METRICS.at(job), rows[0][1][1], UpdateMetrics) if rows else None,
        evaluations=tuple(sorted((_evaluation(job, one) for one in told), key=lambda one: one.when)),
    )


def progress_on_disk(record: JobRecord) -> Progress:
    """Of a job that Redis has forgotten. Raises `ValueError` for a record that cannot be read."""
    return Progress(phase=None, last=None, evaluations=tuple(kept(record.folder)))


def _unpacked(key: str, raw: bytes, kind: type[_Told]) -> _Told:
    try:
        return unpack(raw, kind)
    except BadMessage as error:
        raise BadMessage(f"{key}: {error}") from None


def _evaluation(job: str, told: bytes) -> Evaluation:
    try:
        return decoded(told)
    except msgspec.MsgspecError as error:
        raise BadMessage(f"{EVALUATIONS.at(job)}: {error}") from None


def brief(record: JobRecord, progress: Progress) -> JobBrief:
    """The job in a listing."""
    return JobBrief(**_common(record, progress))


def view(record: JobRecord, progress: Progress) -> JobView:
    """The job with its resolved spec."""
    return JobView(
        **_common(record, progress),
        spec_hash=record.spec_hash,
        spec=record.spec.model_dump(mode="json"),
        waits=record.waits,
        sandbox=record.sandbox,
        pool=record.pool,
        recorded=record.recorded,
        evaluations=progress.evaluations,
    )


def _common(record: JobRecord, progress: Progress) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.spec.name,
        "state": record.state,
        "reason": record.reason,
        "mode": progress.phase.mode if progress.phase else None,
        "phase": progress.phase.phase if progress.phase else None,
        "update": progress.last.update if progress.last else record.update,
        "updates": record.spec.schedule.updates,
        "reward": progress.last.reward if progress.last else None,
        "created": record.created,
        "started": record.started,
        "ended": record.ended,
        "alarm": record.alarm,
        "kind": record.spec.kind,
        "evaluated": max(progress.evaluations, key=lambda one: (one.id, one.when), default=None),
    }

"""Gathers a job's evidence and writes its report into the run folder once it has ended.

consumes      the job's streams and hashes in Redis, its segments on disk
produces      `evidence.msgpack`, `summary.json`, `report.html` in the job's folder
waits for     a job to end and its ledger to settle
unblocked by  the scheduler, which ends what is open; at the latest `SETTLE` seconds after the end

The three files are written whole, the summary last: whoever sees it finds the other two. From then on the report
no longer needs Redis. A gateway that dies in between is no loss: the next one finds a job without a summary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from syncline.contract.diagnosis import Diagnostics
from syncline.contract.events import TERMINAL_JOB_STATES, LedgerSample, Phase, UpdateMetrics
from syncline.contract.streams import DIAGNOSTICS, JOB, JOBS, METRICS, PHASES, SAMPLES, Key
from syncline.environments import environment
from syncline.gateway.answers import encoded
from syncline.gateway.evidence import OPEN_STATES, Evidence, LedgerLine, SampleText, SegmentFacts
from syncline.gateway.gathering import ledger_of
from syncline.gateway.records import JobRecord, find
from syncline.gateway.report import render
from syncline.gateway.summary import summarise
from syncline.gateway.version_lineage import recorded
from syncline.runtime import segments
from syncline.runtime.bus import BadMessage, Bus, unpack
from syncline.runtime.durable import write_whole
from syncline.runtime.evaluations import kept
from syncline.runtime.ledger_shapes import LedgerEntry
from syncline.runtime.settings import Settings

EVIDENCE, SUMMARY, REPORT = "evidence.msgpack", "summary.json", "report.html"
SETTLE = 15.0  # seconds after a job's end within which its open trajectories are ended
INTERVAL = 1.0
AGAIN = 30.0  # seconds until a report that the disk refused is tried again
PAGE = 2000
_LINES = ("ledger", "segments")  # the parts of evidence that grow with each trajectory
_WITHOUT_LINES = msgspec.defstruct(
    "_WithoutLines",
    [
        (field.name, msgspec.Raw if field.name in _LINES else field.type, field.default)
        if field.default is not msgspec.NODEFAULT
        else (field.name, msgspec.Raw if field.name in _LINES else field.type)
        for field in msgspec.structs.fields(Evidence)
    ],
    kw_only=True,
)

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


def keep_reporting(bus: Bus, settings: Settings, stopping: threading.Event) -> None:
    """Write the report of each job that ends, until told to stop."""
    done: set[str] = set()
    later: dict[str, float] = {}  # job -> when its report may be tried again, by the monotonic clock
    while not stopping.wait(INTERVAL):
        open_jobs = [name.decode() for name in bus.zrange(JOBS.at()) if name.decode() not in done]
        for job in _ended(bus, open_jobs):
            if time.monotonic() < later.get(job, 0.0):
                continue
            try:
                if _report(bus, settings, job):
                    done.add(job)
            except OSError as error:  # of the disk, whose trouble may pass; the gateway has more to do
                _LOG.error("no report of %s yet: %s", job, error)
                later[job] = time.monotonic() + AGAIN


def _ended(bus: Bus, jobs: list[str]) -> Iterator[str]:
    """Those that have ended, asked for in few round trips."""
    for i in range(0, len(jobs), PAGE):
        page = jobs[i : i + PAGE]
        states = bus.many([("HGET", JOB.at(job), "state") for job in page])
        yield from (
            job
            for job, state in zip(page, states, strict=True)
            if state is not None and state.decode() in TERMINAL_JOB_STATES
        )


def _report(bus: Bus, settings: Settings, job: str) -> bool:
    """Write the report of an ended job. False: its ledger has not settled. Raises `OSError` of its folder."""
    try:
        record = find(bus, settings, job)
        if record is None or (record.folder / SUMMARY).exists():
            return True
        evidence = gather(bus, record)
    except (BadMessage, segments.BadSegment) as error:
        _LOG.error("no report of %s: %s", job, error)
        return True
    if not settled(evidence, time.time()):
        return False
    write(record.folder, evidence)
    if record.spec.kind == "evaluate":
        _show_beside_rewards(bus, settings, record.spec.versions_of(job))
    _LOG.info("report of %s: %s after %d updates", job, evidence.state, summarise(evidence).updates)
    return True


def _show_beside_rewards(bus: Bus, settings: Settings, job: str) -> None:
    """Write the report of an evaluation's training job again, if it was written before. Raises `OSError`."""
    record = find(bus, settings, job)
    evidence = None if record is None else evidence_of(bus, record)
    if record is not None and evidence is not None and (record.folder / SUMMARY).exists():
        write_whole(record.folder / REPORT, render(evidence).encode())


def settled(evidence: Evidence, now: float) -> bool:
    """Whether the job has ended and nothing more will be told of it. `now`: wall-clock unix seconds."""
    if evidence.state not in TERMINAL_JOB_STATES:
        return False
    still_open = any(evidence.counts.get(state, 0) for state in OPEN_STATES)
    return not still_open or (evidence.ended is not None and now - evidence.ended > SETTLE)


def write(folder: Path, evidence: Evidence) -> None:
    """The three files, whole, the summary last."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / EVIDENCE, msgspec.msgpack.encode(evidence))
    write_whole(folder / REPORT, render(evidence).encode())
    write_whole(folder / SUMMARY, msgspec.json.format(encoded(summarise(evidence)), indent=2) + b"\n")


def evidence_of(bus: Bus, record: JobRecord, *, whole: bool = True) -> Evidence | None:
    """Evidence from Redis while it knows the job, from the run folder afterwards, None when neither has it.

    whole   with a line of each trajectory, which may be a million; else without `ledger` and `segments` where those
            would have to be read from the folder
    """
    if record.recorded:
        return gather(bus, record)
    path = record.folder / EVIDENCE
    if not path.is_file():
        return None
    if whole:
        found = msgspec.msgpack.decode(path.read_bytes(), type=Evidence)
    else:
        told = msgspec.structs.asdict(msgspec.msgpack.decode(path.read_bytes(), type=_WITHOUT_LINES))
        found = Evidence(**{**told, "ledger": (), "segments": ()})
    return msgspec.structs.replace(found, evaluations=tuple(kept(record.folder)))  # some ended after the job


def gather(bus: Bus, record: JobRecord) -> Evidence:
    """Evidence of a job that Redis knows."""
    spec = record.spec
    ledger = ledger_of(bus, record)
    folder = record.folder / "segments"
    facts = segment_facts(folder)
    assert record.state != "unrecorded"  # Redis knows it
    return Evidence(
        job=record.id,
        name=spec.name,
        spec_hash=record.spec_hash,
        state=record.state,
        reason=record.reason,
        created=record.created,
        started=record.started,
        ended=record.ended,
        max_lag=spec.schedule.max_lag,
        lag_policy=spec.schedule.lag_policy,
        metrics=_all(bus, METRICS, record.id, UpdateMetrics),
        samples=_all(bus, SAMPLES, record.id, LedgerSample),
        phases=_all(bus, PHASES, record.id, Phase),
        versions=tuple(recorded(bus, record.id)[0].values()),
        counts=ledger.counts(),
        ledger=tuple(map(_line, ledger.lines())),
        segments=facts,
        texts=sample_texts(record, folder, [fact.update for fact in facts]),
        diagnostics=_all(bus, DIAGNOSTICS, record.id, Diagnostics),
        evaluations=tuple(kept(record.folder)),
        prompts=record.prompts,
    )


def segment_facts(folder: Path) -> tuple[SegmentFacts, ...]:
    """What each update's segment holds, in order, without its arrays."""
    found = []
    for update in segments.updates(folder):
        rows = segments.sampled_counts(segments.segment_path(folder, update))
        found.append(
            SegmentFacts(
                update=update,
                trajectories=tuple(trajectory for trajectory, _, _ in rows),
                tokens=tuple(sampled for _, sampled, _ in rows),
                spans=sum(spans for _, _, spans in rows),
            )
        )
    return tuple(found)


def sample_texts(record: JobRecord, folder: Path, updates: list[int]) -> tuple[SampleText, ...]:
    """The best, the middle and the worst trajectory of the first, the middle and the last update."""
    chosen = sorted({updates[0], updates[len(updates) // 2], updates[-1]}) if updates else []
    found = []
    prompts = _Prompts(record)
    for update in chosen:
        rows = segments.read(segments.segment_path(folder, update)).rows
        best = sorted(rows, key=lambda row: (_value(row) is None, -(_value(row) or 0.0)))
        for row in best[:1] + best[len(best) // 2 :][:1] + best[-1:]:
            t = row.trajectory
            text = SampleText(
                update=update,
                trajectory=t.trajectory,
                prompt=prompts.text(t.prompt),
                text=t.text,
                reward=_value(row),
            )
            if text not in found:
                found.append(text)
    return tuple(found)


def _value(row: segments.SegmentRow) -> float | None:
    return row.reward.value if row.reward is not None else None


class _Prompts:
    """Prompt texts by index; the task is loaded once, and only when there is something to show."""

    def __init__(self, record: JobRecord) -> None:
        self._record = record
        self._loaded: environment.Environment | None = None
        self._absent = False

    def text(self, index: int) -> str:
        """The prompt as text, "" when its data is not on this machine."""
        if self._loaded is None and not self._absent:
            try:
                self._loaded = environment.load(self._record.spec.task, self._record.spec.seeds.data)
            except (ValueError, OSError) as error:
                _LOG.warning("no prompts of %s in its report: %s", self._record.id, error)
                self._absent = True
        return "" if self._loaded is None else self._loaded.prompt(index).plain()


def _all(bus: Bus, key: Key, job: str, type: type[T]) -> tuple[T, ...]:
    found: list[T] = []
    start = "-"
    while True:
        entries = bus.range(key.at(job), start, "+", PAGE)
        found += [unpack(entry, type) for entry in entries]
        if len(entries) < PAGE:
            return tuple(found)
        start = f"({entries[-1].id}"


def _line(entry: LedgerEntry) -> LedgerLine:
    return LedgerLine(
        trajectory=entry.trajectory, state=entry.state, reason=entry.reason, tokens=entry.tokens
    )

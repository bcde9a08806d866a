"""What a job of any length leaves behind: ledger, records, segments, scores, versions and spans.

All is written by what writes it in a real job: the ledger's scripts, the trainer's intake, `segments`, sync's version
records, the span store. Tokens come from no model. An update takes 64 trajectories, of which one group of eight could
not be scored and is filtered; after the last one a batch is buffered and one is running.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stream_stages import BATCH, GROUP, SPEC, Part

from syncline.contract.streams import GROUP_ROLLOUT, WORK
from syncline.contract.token_path import Reward
from syncline.contract.version_path import VersionId, VersionRecord, WorkerPath
from syncline.runtime import segments
from syncline.runtime.bus import Bus
from syncline.runtime.ledger import Ledger
from syncline.runtime.segments import ScoreRow, Scores, Segment
from syncline.runtime.settings import Settings
from syncline.runtime.trace_store import SpanRecord, TraceStore
from syncline.sync.record import Records
from syncline.trainer.intake import Intake

SIZE = 1024  # bytes of a record, about
CHUNK = 8 * BATCH  # trajectories in flight at a time
UNSCORED = BATCH // GROUP - 1  # which group of each update has no rewards
WORKERS = ("w0", "w1")
SECONDS = 10.0  # of an update; the last one is made now, for the gateway prunes old spans


class LeftJob:
    """Job `job`, led through `updates` updates."""

    def __init__(self, url: str, settings: Settings, job: str, updates: int) -> None:
        self.job, self.updates = job, updates
        self._began = time.time() - SECONDS * (updates + 1)
        self._url, self._settings = url, settings
        self._bus = Bus(url)
        self._spans = TraceStore(settings.traces)
        self._records = Records(self._bus, job)

    def lead(self) -> None:
        """From the first submission to the last checkpoint; then a batch that waits, and one that is sampled."""
        folder = self._settings.job_dir(self.job)
        folder.mkdir(exist_ok=True)
        (folder / "spec.json").write_text(SPEC.canonical())
        self._bus.ensure_group(WORK.at(self.job), GROUP_ROLLOUT)
        self._version(VersionId(0, 0))
        end = self.updates * BATCH
        for first in range(0, end, CHUNK):
            part = self._sampled(min(CHUNK, end - first), first)
            for update in range(first // BATCH + 1, (first + part.count) // BATCH + 1):
                self._update(part, update)
            part.bus.close()
        self._sampled(BATCH, end).bus.close()
        running = Part(self._url, self.job, BATCH, end + BATCH, SIZE)
        running.stages["submit"]()
        running.bus.close()

    def ledger(self) -> Ledger:
        """The job's ledger, for its end."""
        return Ledger.under(self._bus, self.job, SPEC)

    def close(self) -> None:
        self._spans.close()
        self._bus.close()

    def _sampled(self, count: int, first: int) -> Part:
        part = Part(self._url, self.job, count, first, SIZE)
        for stage in ("submit", "begin", "publish"):
            part.stages[stage]()
        for i, name in enumerate(part.ids):
            scored = i // GROUP % (UNSCORED + 1) != UNSCORED
            value = float(i % 2) if scored else None
            part.ledger.reward(
                Reward(
                    trajectory=name,
                    attempt=1,
                    state="scored" if scored else "failed",
                    value=value,
                    judge="characters/1",
                )
            )
        return part

    def _update(self, part: Part, update: int) -> None:
        """As the trainer makes it: segment, step, scores, version; the spans of all."""
        intake = Intake(part.bus, part.ledger, SPEC, SPEC.hash())
        claim = part.ledger.claim(update, update - 1)
        if claim is None:
            raise RuntimeError(f"update {update}: nothing can be claimed")
        segment = intake.segment(claim, VersionId(0, update - 1))
        folder = self._settings.job_dir(self.job) / "segments"
        segments.write(folder, segment)
        intake.end_unused(segment)
        trained = [row.trajectory.trajectory for row in segment.rows]
        if len(trained) != BATCH - GROUP:
            raise RuntimeError(f"update {update}: {len(trained)} trajectories are trained")
        part.ledger.trained(update, trained)
        segments.write_scores(folder, _scores(segment))
        part.ledger.forget([row.trajectory.trajectory for row in segment.members])
        self._version(VersionId(0, update))
        self._spans.write(_spans(segment, self._began + SECONDS * update))

    def _version(self, version: VersionId) -> None:
        """A version that both workers have taken; the one before is left."""
        at = self._began + SECONDS * version.number
        parent = VersionId(0, version.number - 1) if version.number else None
        self._records.publish(
            VersionRecord(
                version=version,
                parent=parent,
                optimizer_step=version.number,
                contract=SPEC.contract_digest(),
                state="active",
                digest=f"{version.number:064x}",
                representation="bf16",
                nbytes=1 << 20,
                new_bytes=1 << 19,
                traceparent=_context(version.number, 0),
                minted=at,
                converted=at + 0.1,
                published=at + 0.2,
                active=at + 0.4,
                workers={
                    name: WorkerPath(
                        staged=at + 0.3,
                        verified=at + 0.35,
                        active=at + 0.4,
                        verdict="verified",
                        loaded_digest=f"{version.number:064x}",
                        canary_gap=1e-6,
                        pause_ms=0.2,
                        policy="continue_old",
                    )
                    for name in WORKERS
                },
            )
        )
        self._bus.many(self._records.commands())
        self._spans.write(_version_spans(self.job, version, at))


def _scores(segment: Segment) -> Scores:
    rows = []
    for row in segment.rows:
        behaviour = row.trajectory.logprobs
        rows.append(
            ScoreRow(
                trajectory=row.trajectory.trajectory,
                logprobs=array("f", [one + 0.01 for one in behaviour]),
                weights=array("f", [1.0] * len(behaviour)),
                gap=array("f", [0.01] * len(behaviour)),
                advantage=row.advantage,
            )
        )
    return Scores(update=segment.update, minted=VersionId(0, segment.update), skipped=False, rows=tuple(rows))


# ---- spans ------------------------------------------------------------------------------------------------
def _spans(segment: Segment, at: float) -> Iterator[SpanRecord]:
    """Every hop of every trajectory of an update that was made at wall-clock second `at`."""
    for row in segment.members:
        t = row.trajectory
        said: dict[str, Any] = {"job": t.job, "trajectory": t.trajectory}
        (span,) = t.spans
        sampled = {
            "attempt": t.attempt, "worker": span.worker, "version": str(span.version), "digest": span.digest,
            "context": span.context, "start": span.start, "end": span.end,
        }  # fmt: skip
        update = {"update": segment.update}
        hops: list[tuple[str, str, dict[str, Any]]] = [
            ("token.prompted", "scheduler", {"group": t.group, "index": t.index}),
            ("token.sampled", "rollout", sampled),
            ("token.published", "rollout", {"attempt": 1, "worker": "w0", "tokens": span.end, "spans": 1}),
            ("token.rewarded", "errands", {"attempt": 1, "state": "scored", "reward": 1.0}),
        ]
        if row.use == "train":
            hops += [
                ("token.admitted", "trainer", {**update, "lag": row.lag}),
                ("token.scored", "trainer", {**update, "version": str(segment.base), "mean_abs_logprob_gap": 0.01}),
                ("token.trained", "trainer", {**update, "minted": f"0.{segment.update}", "advantage": row.advantage}),
            ]  # fmt: skip
        number = t.group * GROUP + t.index + 1
        for i, (name, service, attributes) in enumerate(hops):
            yield _span(name, service, 1 + number, i, at - SECONDS + i, said | attributes)


def _version_spans(job: str, version: VersionId, at: float) -> Iterator[SpanRecord]:
    said: dict[str, Any] = {"job": job, "version": str(version)}
    digest = f"{version.number:064x}"
    hops: list[tuple[str, str, dict[str, Any]]] = [
        ("version.minted", "trainer", {"parent": "none", "optimizer_step": version.number, "trajectories": BATCH}),
        ("version.converted", "sync", {"representation": "bf16", "bytes": 1 << 20, "new_bytes": 1 << 19}),
        ("version.published", "sync", {"digest": digest}),
    ]  # fmt: skip
    for worker in WORKERS:
        named = {"digest": digest, "worker": worker}
        loaded = {"loaded_digest": digest, "canary_gap": 1e-6, "verdict": "verified"}
        hops += [
            ("version.staged", "rollout", {**named, "bytes": 1 << 19}),
            ("version.verified", "rollout", {**named, **loaded}),
            ("version.active", "rollout", {**named, "pause_ms": 0.2, "policy": "continue_old", "in_flight": 3}),
        ]  # fmt: skip
    for i, (name, service, attributes) in enumerate(hops):
        yield _span(name, service, (1 << 40) + version.number, i, at + 0.1 * i, said | attributes)


def _span(
    name: str, service: str, trace: int, number: int, at: float, attributes: dict[str, Any]
) -> SpanRecord:
    begun = int(at * 1e9)
    return SpanRecord(
        trace_id=f"{trace:032x}",
        span_id=f"{(trace << 4 | number) & (1 << 64) - 1:016x}",
        parent_id=None,
        name=name,
        service=service,
        instance=str(attributes.get("worker", service)),
        start_ns=begun,
        end_ns=begun + 50_000_000,
        attributes=attributes,
    )


def _context(trace: int, span: int) -> str:
    return f"00-{trace + 1:032x}-{span + 1:016x}-01"


def wait_for(path: Path, seconds: float) -> None:
    """Until a file is there. Raises `TimeoutError`."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} did not come in {seconds:.0f} s")
        time.sleep(0.05)

"""What the other services leave of a job, written as they write it: streams, records, segments, spans."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

from serving import Server

from syncline.contract import token_path as tp
from syncline.contract import version_path as vp
from syncline.contract.events import LedgerSample, Minted, Phase, UpdateMetrics, WorkItem
from syncline.contract.version_path import VersionId
from syncline.gateway.gathering import ledger_of
from syncline.gateway.records import find
from syncline.runtime import segments, tracing
from syncline.runtime.ledger import Ledger

DIGEST = {7: "a7" * 32, 8: "a8" * 32}
CONTRACT = "c0" * 32
SIZE = 2  # of a group


def trajectory(job: str, group: int, index: int, attempt: int = 1) -> tp.Trajectory:
    """Three prompt tokens and six sampled ones: four under version 0.7, two under 0.8, with a tool's in between."""
    return tp.Trajectory(
        job=job,
        trajectory=tp.trajectory_id(job, group, index),
        group=group,
        index=index,
        attempt=attempt,
        prompt=group,
        tokens=array("i", [0, 1, 2, 3, 4, 5, 9, 9, 6, 7, 8]),
        segments=(
            tp.Segment(kind="prompt", start=0, end=3),
            tp.Segment(kind="sampled", start=3, end=6),
            tp.Segment(kind="observed", start=6, end=8),
            tp.Segment(kind="sampled", start=8, end=11),
        ),
        logprobs=array("f", [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]),
        loss_mask=bytes([1, 1, 1, 1, 1, 0]),
        spans=(
            tp.VersionSpan(start=0, end=4, version=vp.VersionId(0, 7), digest=DIGEST[7], worker="w0"),
            tp.VersionSpan(start=4, end=6, version=vp.VersionId(0, 8), digest=DIGEST[8], worker="w0"),
        ),
        convention=tp.SamplingConvention(),
        finish="stop",
        contract=CONTRACT,
        text="d e f g h i",
        traceparent=tracing.new_traceparent(),
        timing=tp.Timing(started=1000.0, queued=0.1, prefill=0.2, decode=0.3),
    )


def reward(t: tp.Trajectory, value: float = 0.75) -> tp.Reward:
    return tp.Reward(
        trajectory=t.trajectory,
        attempt=t.attempt,
        state="scored",
        value=value,
        judge="characters/1",
        seconds=0.5,
    )


def row(t: tp.Trajectory, use: str = "train") -> segments.SegmentRow:
    return segments.SegmentRow(
        trajectory=t,
        reward=reward(t),
        use=use,  # type: ignore[arg-type]
        why="" if use == "train" else "no member of its group was scored",
        lag=2,
        advantage=0.5 if use == "train" else 0.0,
        used_mask=t.loss_mask,
    )


def write_update(
    folder: Path, job: str, update: int, rows: list[segments.SegmentRow], scored: bool = True
) -> None:
    """What the trainer leaves of one update."""
    base = vp.VersionId(0, update - 1)
    segment = segments.Segment(
        job=job, update=update, base=base, contract=CONTRACT, spec_hash="s", members=tuple(rows)
    )
    segments.write(folder / "segments", segment)
    if scored:
        trained = [r for r in rows if r.use == "train"]
        gap = array("f", [0.01] * 6)
        scores = segments.Scores(
            update=update,
            minted=vp.VersionId(0, update),
            skipped=False,
            rows=tuple(
                segments.ScoreRow(
                    trajectory=r.trajectory.trajectory,
                    logprobs=array("f", [b + 0.01 for b in r.trajectory.logprobs]),
                    weights=array("f", [1.0] * 6),
                    gap=gap,
                    advantage=0.5,
                )
                for r in trained
            ),
        )
        segments.write_scores(folder / "segments", scores)


def trace(server: Server, t: tp.Trajectory, update: int) -> None:
    """The spans that the services leave of one trained trajectory and of version 0.7."""
    job, tid = t.job, t.trajectory
    tracing.setup("test", "test", server.settings.traces, None)
    told: dict[str, Any] = {"trajectory": tid, "job": job}
    parent = tracing.record(tp.PROMPTED, None, 1.0, 1.1, **told, group=t.group, index=t.index)
    for attempt, span in [(0, t.spans[0]), *((t.attempt, span) for span in t.spans)]:
        tracing.record(
            tp.SAMPLED,
            parent,
            2.0 + attempt,
            3.0 + attempt,
            **told,
            attempt=attempt,
            worker=span.worker,
            version=span.version,
            digest=span.digest,
            context=span.context,
            start=span.start,
            end=span.end,
        )
    tracing.record(tp.PUBLISHED, parent, 4.0, 4.5, **told, attempt=t.attempt, worker="w0", tokens=6, spans=2)
    tracing.record(tp.REWARDED, parent, 5.0, 5.5, **told, attempt=t.attempt, state="scored", reward=0.75)
    tracing.record(tp.ADMITTED, parent, 6.0, 6.1, **told, update=update, lag=2)
    for moment in (7.0, 9.0):  # a resumed trainer repeats the update
        minted = vp.VersionId(int(moment == 9.0), update)
        tracing.record(
            tp.TRAINED, parent, moment, moment + 1, **told, update=update, minted=minted, advantage=0.5
        )
    version: dict[str, Any] = {"job": job, "version": vp.VersionId(0, 7)}
    tracing.record(
        vp.MINTED, None, 0.1, 0.2, **version, parent=vp.VersionId(0, 6), optimizer_step=7, trajectories=4
    )
    tracing.record(
        vp.CONVERTED,
        None,
        0.2,
        0.3,
        **version,
        representation="bf16",
        place="sync",
        bytes=100,
        new_bytes=40,
        tensors=3,
        ranks=0,
        gather_ms=0.0,
    )
    tracing.record(vp.PUBLISHED, None, 0.3, 0.4, **version, digest=DIGEST[7])
    for worker in ("w1", "w0"):
        named = {**version, "digest": DIGEST[7], "worker": worker}
        tracing.record(
            vp.STAGED, None, 0.4, 0.5, **named, bytes=40, transfer="files", pulled_bytes=0, pull_seconds=0.0
        )
        tracing.record(
            vp.VERIFIED, None, 0.5, 0.6, **named, loaded_digest=DIGEST[7], canary_gap=1e-5, verdict="verified"
        )
        tracing.record(vp.ACTIVE, None, 0.6, 0.7, **named, pause_ms=1.5, policy="continue_old", in_flight=3)
    tracing.shutdown()


def ledger(server: Server, job: str) -> Ledger:
    record = find(server.bus, server.settings, job)
    assert record is not None
    return ledger_of(server.bus, record)


def submit_group(server: Server, job: str, group: int) -> None:
    items = [
        WorkItem(
            job=job,
            trajectory=tp.trajectory_id(job, group, i),
            group=group,
            index=i,
            prompt=group,
            traceparent="",
            submitted_at=1.0,
        )
        for i in range(SIZE)
    ]
    assert ledger(server, job).submit(items, SIZE)


def publish(server: Server, job: str, group: int) -> list[tp.Trajectory]:
    """A group goes from submitted to buffered, as the rollout does it."""
    submit_group(server, job, group)
    book, made = ledger(server, job), []
    for index in range(SIZE):
        name = tp.trajectory_id(job, group, index)
        entry = book.entry(name)
        assert entry is not None
        t = trajectory(job, group, index, entry.attempt)
        assert book.begin(name, entry.attempt, "w0", t.oldest) == "go"
        assert book.publish(t, entry.work_id or "") == "published"
        made.append(t)
    return made


def metrics(update: int, **changes: Any) -> UpdateMetrics:
    """One update's metrics."""
    said: dict[str, Any] = {
        "update": update,
        "epoch": 0,
        "mode": "colocated",
        "groups": 8,
        "trajectories": 64,
        "tokens": 900,
        "reward": 0.25,
        "unscored": 0,
        "lag_max": 1,
        "lag_mean": 0.5,
        "lag_counts": {"0": 32, "1": 32},
        "loss": 0.1,
        "grad_norm": 1.0,
        "entropy": 2.0,
        "ratio_mean": 1.0,
        "clip_fraction": 0.0,
        "gap_mean": 0.001,
        "gap_max": 0.01,
        "same_version_gap": 0.0001,
        "kl": None,
        "response_mean": 14.0,
        "masked_tokens": 0,
        "expired": 0,
        "waited": 0.1,
        "seconds": 0.2,
        "non_finite": 0,
        "skipped": False,
        "at": 1_788_000_000.0,
    }
    return UpdateMetrics(**{**said, **changes})


def minted(number: int) -> Minted:
    return Minted(version=VersionId(0, number))


def phase(seq: int) -> Phase:
    return Phase(
        seq=seq,
        mode="colocated",
        phase="sample",
        rollout="awake",
        trainer="asleep",
        gate="open",
        update=seq,
        at=1.0,
    )


def sample(at: float) -> LedgerSample:
    return LedgerSample(
        submitted=1, running=1, buffered=0, trained=0, filtered=0, failed=0, expired=0, holds=True, at=at
    )

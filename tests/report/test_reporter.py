"""The report of an ended job is gathered from a real Redis and its segments, and outlives Redis."""

from __future__ import annotations

import json
import threading
import time
from array import array
from pathlib import Path

import msgspec
import pytest
from evidence import metrics, phase, sample
from waiting import wait_until

from syncline.contract.events import WorkItem
from syncline.contract.job import JobSpec, ModelSpec
from syncline.contract.streams import JOB, JOBS, METRICS, PHASES, SAMPLES
from syncline.contract.token_path import (
    Reward,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    trajectory_id,
)
from syncline.contract.version_path import VersionId
from syncline.gateway.records import find
from syncline.gateway.reporter import evidence_of, gather, keep_reporting
from syncline.gateway.summary import summarise
from syncline.runtime import segments
from syncline.runtime.bus import Bus
from syncline.runtime.ledger import Ledger
from syncline.runtime.settings import Settings

SPEC = JobSpec.model_validate(
    {
        "name": "reported",
        "model": ModelSpec(name="tiny", weights="random"),
        "batch": {"groups": 1, "group_size": 2},
    }
)
VERSION = VersionId(0, 0)


def trajectory(job: str, group: int, index: int, sampled: int) -> Trajectory:
    return Trajectory(
        job=job,
        trajectory=trajectory_id(job, group, index),
        group=group,
        index=index,
        attempt=1,
        prompt=group,
        tokens=array("i", range(2 + sampled)),
        segments=(
            Segment(kind="prompt", start=0, end=2),
            Segment(kind="sampled", start=2, end=2 + sampled),
        ),
        logprobs=array("f", [-0.5] * sampled),
        loss_mask=b"\1" * sampled,
        spans=(VersionSpan(start=0, end=sampled, version=VERSION, digest="d" * 64, worker="w0"),),
        convention=SamplingConvention(),
        finish="stop",
        contract="c" * 64,
        text=f"answer {group}-{index}",
        traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        timing=Timing(started=1.0, queued=0.1, prefill=0.1, decode=0.1),
    )


class Lived:
    """A job that made one update from group 0 and dropped group 1."""

    def __init__(self, bus: Bus, job: str, runs: Path) -> None:
        self.bus, self.job, self.folder = bus, job, runs / job
        self.ledger = Ledger(bus, job, batch_groups=1, max_lag=1, policy="wait", max_attempts=5)
        now = time.time()
        fields = {"spec": SPEC.canonical(), "spec_hash": SPEC.hash(), "name": SPEC.name, "state": "running"}
        bus.hset(JOB.at(job), {**fields, "reason": "", "waits": "[]", "created": now - 9, "started": now - 8})
        bus.zadd(JOBS.at(), {job: now})
        for group in (0, 1):
            self._sample(group)
        self._train()
        for index in (0, 1):
            self.ledger.end(trajectory_id(job, 1, index), "expired", "lag")
        for order in (phase(1, "colocated", "sample", 0), phase(2, "colocated", "done", 1)):
            bus.append(PHASES.at(job), order)
        bus.append(SAMPLES.at(job), sample(now, 2, running=0, buffered=2))

    def _sample(self, group: int) -> None:
        items = [
            WorkItem(
                job=self.job,
                trajectory=trajectory_id(self.job, group, index),
                group=group,
                index=index,
                prompt=group,
                traceparent="",
                submitted_at=0.0,
            )
            for index in (0, 1)
        ]
        assert self.ledger.submit(items, 2)
        for item in items:
            record = trajectory(self.job, group, item.index, 3 + 10 * group)
            assert self.ledger.begin(item.trajectory, 1, "w0", VERSION) == "go"
            line = self.ledger.entry(item.trajectory)
            assert line is not None
            assert line.work_id is not None
            assert self.ledger.publish(record, line.work_id) == "published"
            self.ledger.reward(Reward(trajectory=item.trajectory, attempt=1, state="scored", value=1.0))

    def _train(self) -> None:
        claim = self.ledger.claim(1, 0)
        assert claim is not None
        rows = tuple(
            segments.SegmentRow(
                trajectory=trajectory(self.job, 0, index, 3),
                reward=Reward(
                    trajectory=trajectory_id(self.job, 0, index),
                    attempt=1,
                    state="scored",
                    value=float(index),
                ),
                use="train",
                why="",
                lag=0,
                advantage=0.0,
                used_mask=b"\1\1\1",
            )
            for index in (0, 1)
        )
        kept = segments.Segment(
            job=self.job, update=1, base=VERSION, contract="c" * 64, spec_hash=SPEC.hash(), members=rows
        )
        segments.write(self.folder / "segments", kept)
        self.ledger.trained(1, claim.trajectories)
        self.bus.append(METRICS.at(self.job), metrics(1, reward=0.5))

    def end(self) -> None:
        self.bus.hset(JOB.at(self.job), {"state": "succeeded", "ended": time.time()})


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    return Settings.read({"SYNCLINE_REDIS_URL": f"{redis_url}?db=6", "SYNCLINE_RUNS": str(tmp_path)})


@pytest.fixture
def lived(settings: Settings, job: str) -> Lived:
    return Lived(Bus(settings.redis_url), job, settings.runs)


def test_evidence_is_what_the_job_left(lived: Lived, settings: Settings) -> None:
    record = find(lived.bus, settings, lived.job)
    assert record is not None
    found = gather(lived.bus, record)
    s = summarise(found)
    assert (s.ledger.submitted, s.ledger.trained, s.ledger.expired) == (4, 2, 2)
    assert (s.lost, s.repeated, s.updates) == (0, 0, 1)
    assert s.lag_policy.length.trained_mean == 3
    assert s.lag_policy.length.published_mean == 8
    assert s.lag_policy.length.dropped_mean == 13
    assert {text.text for text in found.texts} == {"answer 0-0", "answer 0-1"}
    assert all(text.prompt for text in found.texts)


def test_a_missing_segment_shows(lived: Lived, settings: Settings) -> None:
    segments.segment_path(lived.folder / "segments", 1).unlink()
    record = find(lived.bus, settings, lived.job)
    assert record is not None
    assert summarise(gather(lived.bus, record)).lost == 2


def test_the_report_is_written_once_the_job_has_ended_and_outlives_redis(
    lived: Lived, settings: Settings
) -> None:
    stopping = threading.Event()
    thread = threading.Thread(target=keep_reporting, args=(lived.bus, settings, stopping))
    thread.start()
    try:
        summary = lived.folder / "summary.json"
        assert not summary.exists()
        lived.end()
        wait_until(summary.exists, 10, "summary.json")
    finally:
        stopping.set()
        thread.join(10)
    told = json.loads(summary.read_text())
    assert (told["state"], told["ledger"]["trained"], told["lost"]) == ("succeeded", 2, 0)
    assert "answer 0-1" in (lived.folder / "report.html").read_text()

    (lived.folder / "spec.json").write_text(SPEC.canonical())
    lived.bus.many([("FLUSHDB",)])
    record = find(lived.bus, settings, lived.job)
    assert record is not None
    assert not record.recorded
    kept = evidence_of(lived.bus, record)
    assert kept is not None
    assert msgspec.json.decode(msgspec.json.encode(summarise(kept))) == told


def test_a_report_that_the_disk_refuses_is_tried_again(
    lived: Lived, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("syncline.gateway.reporter.AGAIN", 0.1)
    in_the_way = lived.folder / "report.html"
    in_the_way.mkdir(parents=True)
    lived.end()
    stopping = threading.Event()
    thread = threading.Thread(target=keep_reporting, args=(lived.bus, settings, stopping))
    thread.start()
    try:
        wait_until(lambda: f"no report of {lived.job} yet" in caplog.text, 20, "the refusal")
        assert not (lived.folder / "summary.json").exists()
        in_the_way.rmdir()
        wait_until((lived.folder / "summary.json").exists, 20, "summary.json")
    finally:
        stopping.set()
        thread.join(10)
    assert in_the_way.read_text().startswith("<!doctype html>")


def test_an_ended_job_that_cannot_be_read_keeps_no_report_from_another(
    lived: Lived, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = "j" + "0" * 10
    lived.bus.hset(JOB.at(damaged), {"spec": "{no", "state": "failed"})
    lived.bus.zadd(JOBS.at(), {damaged: 1.0})  # looked at before the other
    lived.end()
    stopping = threading.Event()
    thread = threading.Thread(target=keep_reporting, args=(lived.bus, settings, stopping))
    thread.start()
    try:
        wait_until((lived.folder / "summary.json").exists, 20, "summary.json")
    finally:
        stopping.set()
        thread.join(10)
        lived.bus.delete(JOB.at(damaged))
        lived.bus.zrem(JOBS.at(), damaged)
    assert f"no report of {damaged}: {JOB.at(damaged)} spec" in caplog.text

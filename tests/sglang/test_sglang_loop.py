"""Whole jobs over REST with SGLang as rollout: recorded versions are true, and the server may die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from cold import gap, score_span
from guarantees import check, segment_files
from specs import spec
from stack import ROOT, Stack
from waiting import wait_until

from syncline.contract.token_path import Trajectory
from syncline.contract.version_path import VersionId
from syncline.runtime import segments
from syncline.runtime.store import BlobStore

CONFIG = ROOT / "examples" / "models" / "tiny-moe" / "config.json"
AGREES = 2e-4
MISMATCH = 20 * AGREES
UPDATES = 10


def job_of(mode: str, in_flight: str, **schedule: Any) -> dict[str, Any]:
    return spec(
        model={"name": "tiny-moe"},
        optimizer={"lr": 1e-2},  # steps large enough to tell versions apart
        loss={"entropy": 0.1},
        sampling={"max_tokens": 48, "length": "lognormal", "length_median": 24, "length_sigma": 0.5},
        schedule={"mode": mode, "updates": UPDATES, "max_lag": 2, "in_flight": in_flight, **schedule},
        rollout={"engine": "sglang", "workers": 1},
        retention={"versions": 1000},
        limits={"activation_wait": 300.0, "worker_start": 300.0, "batch_wait": 600.0},
    )


def records_of(run: Path) -> list[Trajectory]:
    return [row.trajectory for path in segment_files(run) for row in segments.read(path).rows]


def judge(run: Path, t: Trajectory) -> list[tuple[float, float]]:
    """Per span: the gap under the recorded version, and the smallest gap under a neighbour."""
    known = set(BlobStore(run / "store").manifests())
    out = []
    for number, part in enumerate(t.spans):
        reported = t.logprobs[part.start : part.end]
        own = gap(score_span(run, CONFIG, t, number), reported)
        near = [VersionId(part.version.epoch, part.version.number + n) for n in (-1, 1)]
        others = [gap(score_span(run, CONFIG, t, number, under=v), reported) for v in near if v in known]
        out.append((own, min(others)))
    return out


def every_span_is_true(run: Path) -> list[Trajectory]:
    records = records_of(run)
    verdicts = [verdict for t in records for verdict in judge(run, t)]
    assert max(own for own, _ in verdicts) < AGREES
    assert min(other for _, other in verdicts) > 2 * max(own for own, _ in verdicts)
    distinct = sum(other > MISMATCH for _, other in verdicts)
    assert distinct >= 0.95 * len(verdicts), sorted(other for _, other in verdicts)[:10]
    return records


def servers(stack: Stack) -> list[psutil.Process]:
    """The processes whose command line starts a server, below worker w0."""
    pid = stack.pid("w0")
    if pid is None:
        return []
    children = [c for c in psutil.Process(pid).children() if c.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if any(part.endswith("serve.py") for part in child.cmdline())]


@pytest.mark.timeout(900)
def test_every_recorded_version_is_true_and_the_server_may_be_killed(stack: Stack) -> None:
    job = stack.submit(job_of("disjoint", "in_place"))
    stack.wait_update(job, 3, 400)
    (server,) = servers(stack)
    os.kill(server.pid, signal.SIGKILL)

    def another() -> bool:
        return [found.pid for found in servers(stack)] not in ([], [server.pid])

    wait_until(another, 120, "another server below the same worker")
    assert stack.wait(job, 600)["state"] == "succeeded"
    run = stack.runs / job
    check(run, stack.summary(job), UPDATES, max_lag=2)
    records = every_span_is_true(run)
    several = [t for t in records if len(t.spans) > 1]
    assert several, "no trajectory crossed a commit: the test shows nothing"
    assert all(t.expert_ids is not None for t in records)


@pytest.mark.timeout(900)
def test_a_job_that_shares_its_device_and_changes_its_mode(stack: Stack) -> None:
    switch = {"switches": [{"at_update": 5, "mode": "disjoint"}]}
    job = stack.submit(job_of("colocated", "drain", **switch))
    assert stack.wait(job, 600)["state"] == "succeeded"
    run = stack.runs / job
    check(run, stack.summary(job), UPDATES, max_lag=2)
    records = every_span_is_true(run)
    assert all(len(t.spans) == 1 for t in records), "drain puts one version into a trajectory"

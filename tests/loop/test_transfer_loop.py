"""Workers with stores of their own train a job to its end, and what they recorded of versions is true."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guarantees import check, segment_files
from specs import spec
from stack import Stack
from test_truth import AGREES, MISMATCH, judge

from syncline.runtime import segments
from syncline.runtime.store import BlobStore

UPDATES = 4


@pytest.fixture
def apart() -> Iterator[tuple[Stack, Path]]:
    """A stack whose workers keep their stores outside the run root."""
    runs, cache = Path(tempfile.mkdtemp(prefix="sl-")), Path(tempfile.mkdtemp(prefix="sl-"))
    started = Stack(runs, {"SYNCLINE_CACHE": str(cache)})
    try:
        started.up()
        yield started, cache
    finally:
        started.down()
        shutil.rmtree(runs, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["http", "group", "objects"])
def test_a_job_whose_workers_pull(apart: tuple[Stack, Path], kind: str) -> None:
    stack, cache = apart
    transfer: dict[str, Any] = {"kind": kind, "bucket_mb": 1}
    if kind == "objects":
        transfer["url"] = f"file://{cache / 'objects'}"
    else:
        transfer["deltas"] = True
    job = stack.submit(
        spec(
            optimizer={"lr": 1e-2},  # steps large enough to tell versions apart
            loss={"entropy": 0.1},
            schedule={"mode": "disjoint", "updates": UPDATES, "max_lag": 2},
            retention={"versions": 1000},
            transfer=transfer,
        )
    )
    if kind == "http":
        stack.wait_update(job, 1, 100)
        stack.kill("sync")  # the next one listens elsewhere
    assert stack.wait(job, 200)["state"] == "succeeded"
    run = stack.runs / job
    check(run, stack.summary(job), UPDATES, max_lag=2)
    records = [row.trajectory for path in segment_files(run) for row in segments.read(path).rows]
    verdicts = [verdict for t in records[::6] for verdict in judge(run, t)]
    assert max(own for own, _ in verdicts) < AGREES, verdicts
    assert sum(other > MISMATCH for _, other in verdicts) >= 0.9 * len(verdicts), verdicts

    paths = [
        path
        for version in stack.get(f"/v1/jobs/{job}/versions")["items"]
        for path in version["workers"].values()
        if path["pulled"] is not None
    ]
    assert {path["pulled"]["kind"] for path in paths} == {kind}
    assert sum(path["pulled"]["full"] + path["pulled"]["deltas"] for path in paths) > 0
    assert all(path["pulled"]["seconds"] > 0 for path in paths)
    for worker in ("w0", "w1"):
        own = BlobStore(cache / job / worker / "store")
        assert 1 <= len(own.manifests()) <= 2, "what is served and what is staged, and nothing else"
    assert not (run / "workers").exists()

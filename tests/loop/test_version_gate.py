"""The gate before a version is active, in a stack whose engines keep a tensor of the version before in version 2."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guarantees import check
from specs import spec
from stack import Stack

from syncline.runtime import segments
from syncline.runtime.tracing import read_trace

STALE = Path(__file__).parent / "stale"
UPDATES = 4


@pytest.fixture
def stale() -> Iterator[Stack]:
    """A stack whose engines have the defect."""
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    path = os.pathsep.join(filter(None, (str(STALE), os.environ.get("PYTHONPATH"))))
    started = Stack(runs, {"PYTHONPATH": path})
    try:
        started.up()
        yield started
    finally:
        started.down()
        shutil.rmtree(runs, ignore_errors=True)


def sampled_under(folder: Path) -> set[int]:
    """Numbers of the versions that any token in the segments was sampled under."""
    rows = [
        row
        for path in (folder / "segments").glob("update-??????.parquet")
        for row in segments.read(path).members
    ]
    return {span.version.number for row in rows for span in row.trajectory.spans}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["disjoint", "colocated"])
def test_a_version_that_level_6_refuses_is_never_active_and_the_next_one_is(stale: Stack, mode: str) -> None:
    wanted = spec(
        optimizer={"lr": 1e-6},  # the stale tensor stays within what a worker's own prefixes can see
        schedule={"mode": mode, "updates": UPDATES},
        validation={"before_active": [6]},
    )
    job = stale.submit(wanted)
    status = stale.wait(job, 400)
    assert status["state"] == "succeeded", status
    assert "version 0.2 is not active and never will be, 0.1 serves on" in status["alarm"]
    records = {r["version"]: r for r in stale.get(f"/v1/jobs/{job}/versions")["items"]}
    refused = records["0.2"]
    assert refused["state"] == "failed"
    assert "level 6 (live update) fails: warm equals cold" in refused["reason"]
    assert refused["active"] is None
    assert all(worker["active"] is None for worker in refused["workers"].values())
    assert any(worker["verified"] for worker in refused["workers"].values()), (
        "what a worker checks found nothing"
    )
    assert all(records[f"0.{n}"]["active"] for n in (0, 1, 3, 4))
    assert 2 not in sampled_under(stale.runs / job)
    check(stale.runs / job, stale.summary(job), UPDATES, max_lag=1)

    found = stale.get(f"/v1/jobs/{job}/validation")["items"]
    told = {view["version"]: view for view in found if view["state"] != "interrupted"}
    assert {view["why"] for view in found} == {"before_active"}
    assert {version: view["state"] for version, view in told.items()} == {
        "0.0": "holds",
        "0.1": "holds",
        "0.2": "fails",
        "0.3": "holds",
        "0.4": "holds",
    }
    evidence = told["0.2"]["evidence"]
    assert f"figures: {evidence}" in refused["reason"]
    assert (stale.runs / evidence / "evidence" / "level-6.json").is_file()
    assert hops(stale, refused) >= {"version.minted", "validation.climbed", "validation.level"}


def hops(stack: Stack, record: dict[str, Any]) -> set[str]:
    """Names of the spans in the version's trace."""
    return {
        span.name for span in read_trace(stack.runs / "traces.sqlite", record["traceparent"].split("-")[1])
    }

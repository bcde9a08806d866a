"""A whole run measures its own mismatch: rounding at the same weights, staleness where the weights are older."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from guarantees import check
from specs import spec
from stack import Stack

from syncline.runtime import segments
from syncline.runtime.segment_probes import ProbedToken, probes_path, read_probes

ROUNDING = 1e-5  # FP32 sums in another order, on a log-prob
UPDATES, PROBED = 10, 4


def run(stack: Stack, mode: str) -> tuple[Path, str, list[dict[str, Any]]]:
    """A bf16 job on the tiny MoE in `mode`, to its end; its folder, id and diagnostics."""
    job = stack.submit(
        spec(
            model={"name": "tiny-moe"},
            batch={"groups": 4, "group_size": 8},
            optimizer={"lr": 1e-2},  # steps large enough to tell versions apart
            schedule={"mode": mode, "updates": UPDATES, "max_lag": 1},
            diagnostics={"trajectories": PROBED, "learn": 3},
        )
    )
    assert stack.wait(job, 300)["state"] == "succeeded"
    folder = stack.runs / job
    check(folder, stack.summary(job), UPDATES, max_lag=1)
    return folder, job, stack.get(f"/v1/jobs/{job}/diagnostics")["items"]


def judge_tokens(folder: Path, update: int) -> list[ProbedToken]:
    """Every row sums, and agrees with what the segment and the scores of the update say."""
    rows = read_probes(probes_path(folder / "segments", update))
    segment = segments.read(segments.segment_path(folder / "segments", update))
    scores = {r.trajectory: r for r in segments.read_scores(
        segments.scores_path(folder / "segments", update)).rows}  # fmt: skip
    records = {r.trajectory.trajectory: r.trajectory for r in segment.rows}
    assert len({row.trajectory for row in rows}) == PROBED
    for row in rows:
        t = records[row.trajectory]
        assert row.total == pytest.approx(row.mismatch + row.staleness, abs=1e-6)
        assert row.total == pytest.approx(scores[row.trajectory].gap[row.token], abs=1e-6)
        assert row.behaviour == t.logprobs[row.token]
        assert row.version == str(t.span_of(row.token).version)
        assert row.lag == segment.base.number - t.span_of(row.token).version.number
    assert len(rows) == sum(records[name].sampled for name in {row.trajectory for row in rows})
    return rows


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["colocated", "disjoint"])
def test_mismatch_is_rounding_and_staleness_comes_with_lag(stack: Stack, mode: str) -> None:
    folder, job, found = run(stack, mode)
    assert [r["update"] for r in found] == list(range(1, UPDATES + 1))
    measured = [r for r in found if r["trajectories"] == PROBED]
    # a version that another overtakes before anybody serves it cannot be measured; it says so
    assert len(measured) >= (UPDATES if mode == "colocated" else UPDATES - 3), found
    assert all(r["unmeasured"]["answers"] for r in found if r not in measured)
    rows = [row for r in measured for row in judge_tokens(folder, r["update"])]
    assert max(abs(row.mismatch) for row in rows) < ROUNDING
    fresh = [abs(row.staleness) for row in rows if row.lag == 0]
    assert fresh
    assert max(fresh) < ROUNDING
    for r in measured:
        assert r["routes"] == [1.0] * len(r["routes"])
        assert r["diverging"].keys() == {"none"}
        assert r["exact"] > 0.5
        assert r["alarms"] == []
    late = [r["baseline"] for r in measured[2:]]
    assert all(b is not None and b < ROUNDING for b in late), late
    assert all(a == b for a, b in pairwise(late)), "a baseline is learned once"
    if mode == "disjoint":
        old = [abs(row.staleness) for row in rows if row.lag == 1]
        assert old, "no probed token was older: the test shows nothing of staleness"
        assert sum(old) / len(old) > 100 * ROUNDING
    shown(stack, job, folder, measured[-1]["update"])


def shown(stack: Stack, job: str, folder: Path, update: int) -> None:
    """Where people look: summary, report, command line, the token's own path."""
    summary = stack.summary(job)["diagnostics"]
    assert summary["terms"]["mismatch"]["max"] < ROUNDING
    assert "Mismatch and staleness by update" in (folder / "report.html").read_text()
    table = stack.cli("diagnose", job)
    assert table.returncode == 0, table.stderr
    assert "trainer - rollout at the same version" in table.stdout, "columns are explained"
    assert "not measured in update" in table.stdout
    row = read_probes(probes_path(folder / "segments", update))[0]
    path = stack.get(f"/v1/jobs/{job}/trajectories/{row.trajectory}/tokens/{row.token}")
    assert path["decomposition"]["mismatch"] == row.mismatch
    told = stack.cli("trace", row.trajectory, "--token", str(row.token)).stdout
    assert f"mismatch {row.mismatch:+.2e} + staleness {row.staleness:+.2e}" in told

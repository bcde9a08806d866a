"""Recorded versions are true: a cold engine that holds the recorded version agrees, its neighbours do not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cold import gap, score_span
from guarantees import check, segment_files
from specs import spec
from stack import ROOT, Stack

from syncline.contract.token_path import Trajectory
from syncline.contract.version_path import VersionId
from syncline.runtime import segments
from syncline.runtime.store import BlobStore

CONFIG = ROOT / "examples" / "models" / "tiny-dense" / "config.json"
AGREES = 2e-4  # FP32, another batch shape than the sampler's
MISMATCH = 20 * AGREES


def neighbours(run: Path, version: VersionId) -> list[VersionId]:
    """The versions right before and after in the store. Their numbers need not be next: one that another overtakes
    before it is converted never gets there, and no worker can have read it.
    """
    known = BlobStore(run / "store").manifests()
    at = known.index(version)
    return [*known[:at][-1:], *known[at + 1 :][:1]]


def judge(run: Path, t: Trajectory) -> list[tuple[float, float]]:
    """Per span: the gap under the recorded version, and the smallest gap under a neighbour."""
    out = []
    for number, part in enumerate(t.spans):
        reported = t.logprobs[part.start : part.end]
        own = gap(score_span(run, CONFIG, t, number), reported)
        others = [
            gap(score_span(run, CONFIG, t, number, under=v), reported) for v in neighbours(run, part.version)
        ]
        out.append((own, min(others)))
    return out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("in_flight", "kv"),
    [
        ("drain", "recomputed"),
        ("continue_old", "recomputed"),
        ("in_place", "recomputed"),
        ("in_place", "carried"),
    ],
)
def test_recorded_versions_are_true(stack: Stack, in_flight: str, kv: str) -> None:
    updates = 10
    job = stack.submit(
        spec(
            optimizer={"lr": 1e-2},  # steps large enough to tell versions apart,
            loss={"entropy": 0.1},  # also where all rewards of a group are equal
            sampling={"max_tokens": 48, "length": "lognormal", "length_median": 24, "length_sigma": 0.5},
            schedule={"mode": "disjoint", "updates": updates, "max_lag": 2, "in_flight": in_flight, "kv": kv},
            rollout={"pace": [0.2, 0.2]},  # slower than the trainer, so that versions come while they sample
            retention={"versions": 1000},
        )
    )
    assert stack.wait(job, 300)["state"] == "succeeded"
    run = stack.runs / job
    check(run, stack.summary(job), updates, max_lag=2)
    records = [row.trajectory for path in segment_files(run) for row in segments.read(path).rows]
    several = [t for t in records if len(t.spans) > 1]
    if in_flight == "in_place":
        assert several, "no trajectory crossed a commit: the test shows nothing"
        assert {s.context for t in several for s in t.spans[1:]} >= {kv}
    else:
        assert not several, "only in_place may put two versions into one trajectory"
    chosen = several[:16] + records[:: max(1, len(records) // 16)]
    verdicts = [v for t in chosen for v in judge(run, t)]
    assert max(own for own, _ in verdicts) < AGREES, verdicts
    distinct = sum(other > MISMATCH for _, other in verdicts)
    assert distinct >= 0.95 * len(verdicts), sorted(other for _, other in verdicts)[:10]

    relabelled = chosen[0]
    first = relabelled.spans[0]
    wrong = msgspec.structs.replace(first, version=neighbours(run, first.version)[0])
    lie = msgspec.structs.replace(relabelled, spans=(wrong, *relabelled.spans[1:]))
    assert judge(run, lie)[0][0] > AGREES, "a relabelled span must not pass"

"""An evaluation samples held-out prompts with the version that it names and no other, and counts what it can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cold import gap, score_span
from guarantees import segment_files
from specs import spec
from stack import ROOT, Stack

from syncline.contract.evaluation import Evaluation
from syncline.contract.evaluation_spec import HELD_OUT
from syncline.contract.version_path import VersionId
from syncline.runtime import segments
from syncline.runtime.evaluations import kept

CONFIG = ROOT / "examples" / "models" / "tiny-dense" / "config.json"
AGREES = 2e-4  # FP32, another batch shape than the sampler's
PROMPTS, SAMPLES = 6, 3
PART = {"prompts": PROMPTS, "samples": SAMPLES, "k": [1, 3]}


def judge(run: Path, result: Evaluation, path: Path, other: VersionId) -> None:
    """Each record of the evaluation is of its version, as a cold engine finds; `other` would have been found out."""
    rows = segments.read(path).members
    assert sorted({row.trajectory.prompt for row in rows}) == list(range(HELD_OUT, HELD_OUT + PROMPTS))
    assert len(rows) == result.counted == PROMPTS * SAMPLES
    assert (result.unscored, result.lost, result.foreign) == (0, 0, 0)
    lies = []
    for row in rows:
        t = row.trajectory
        assert [(span.version, span.digest) for span in t.spans] == [(result.id, result.digest)]
        assert gap(score_span(run, CONFIG, t, 0), t.logprobs) < AGREES, t.trajectory
        lies.append(gap(score_span(run, CONFIG, t, 0, under=other), t.logprobs))
    assert min(lies) > AGREES, "another version must not pass"
    values = [row.reward.value for row in rows if row.reward is not None and row.reward.value is not None]
    assert result.mean_reward == pytest.approx(sum(values) / len(values))
    one, three = result.pass_at["1"], result.pass_at["3"]
    assert one is not None
    assert three is not None
    assert one[0] == pytest.approx(sum(value >= 1 for value in values) / len(values))
    assert one[0] <= three[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_versions_are_evaluated_beside_training_and_afterwards(stack: Stack) -> None:
    job = stack.submit(
        spec(
            optimizer={"lr": 1e-2},
            loss={"entropy": 0.1},
            schedule={"updates": 3},
            rollout={"workers": 1},
            retention={"versions": 9},
            evaluation={"every": 2, **PART},
        )
    )
    assert stack.wait(job, 120)["state"] == "succeeded"
    run = stack.runs / job
    beside = kept(run)
    assert [(str(one.id), one.shared) for one in beside] == [("0.0", True), ("0.2", True)]
    for one in beside:
        path = segments.segment_path(run / "evaluations", one.version + 1)
        judge(run, one, path, VersionId(0, one.version + 1))
    trained = [row for path in segment_files(run) for row in segments.read(path).members]
    assert trained
    assert max(row.trajectory.prompt for row in trained) < HELD_OUT, "the trainer was given held-out prompts"

    asked = ("--prompts", str(PROMPTS), "--samples", str(SAMPLES), "--k", "1,3", "--json")
    done = stack.cli("eval", job, "--version", "latest", *asked)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (alone,) = kept(stack.runs / told[0]["job"])
    assert (str(alone.id), alone.shared, alone.of) == ("0.3", False, job)
    (path,) = segment_files(stack.runs / alone.job)
    judge(run, alone, path, VersionId(0, 2))

    lines = (run / "evaluations.jsonl").read_text().splitlines()
    assert stack.get(f"/v1/jobs/{job}/evaluations")["items"] == [json.loads(line) for line in lines]
    assert [one["version"] for one in stack.status(job)["evaluations"]] == [0, 2, 3]
    assert stack.status(job)["evaluated"]["version"] == 3
    assert "0.3" in stack.http.get(f"{stack.url}/v1/jobs/{job}/report").text
    gone = stack.cli("eval", job, "--version", "7")
    assert gone.returncode != 0
    assert "can be evaluated: 0.0, 0.1, 0.2, 0.3" in gone.stderr

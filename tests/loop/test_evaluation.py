"""An evaluation samples held-out prompts with the version that it names and no other, and counts what it can."""

from __future__ import annotations

import json

import pytest
from cold import gap, score_span
from guarantees import segment_files
from specs import spec
from stack import ROOT, Stack

from syncline.contract.evaluation_spec import HELD_OUT
from syncline.contract.version_path import parse_version
from syncline.runtime import segments
from syncline.runtime.evaluations import kept

CONFIG = ROOT / "examples" / "models" / "tiny-dense" / "config.json"
AGREES = 2e-4  # FP32, another batch shape than the sampler's
PROMPTS, SAMPLES = 6, 3


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_versions_are_evaluated_and_each_record_is_of_its_version(stack: Stack) -> None:
    job = stack.submit(
        spec(
            optimizer={"lr": 1e-2}, loss={"entropy": 0.1}, schedule={"updates": 3}, retention={"versions": 9}
        )
    )
    assert stack.wait(job, 90)["state"] == "succeeded"
    trained = {
        row.trajectory.prompt
        for path in segment_files(stack.runs / job)
        for row in segments.read(path).members
    }
    assert max(trained) < HELD_OUT
    for version in ("0.1", "latest"):
        asked = ("--prompts", str(PROMPTS), "--samples", str(SAMPLES), "--k", "1,3", "--json")
        done = stack.cli("eval", job, "--version", version, *asked)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)[0]
        assert told["counted"] == PROMPTS * SAMPLES
        assert (told["unscored"], told["lost"], told["foreign"]) == (0, 0, 0)
        pinned = parse_version(f"{told['epoch']}.{told['version']}")
        assert str(pinned) == {"latest": "0.3"}.get(version, version)
        (path,) = segment_files(stack.runs / told["job"])
        rows = segments.read(path).members
        assert sorted({row.trajectory.prompt for row in rows}) == list(range(HELD_OUT, HELD_OUT + PROMPTS))
        assert len(rows) == PROMPTS * SAMPLES
        for row in rows:
            t = row.trajectory
            assert [(span.version, span.digest) for span in t.spans] == [(pinned, told["digest"])]
            own = gap(score_span(stack.runs / job, CONFIG, t, 0), t.logprobs)
            assert own < AGREES, (t.trajectory, own)
        other = parse_version("0.0")
        lies = [
            gap(score_span(stack.runs / job, CONFIG, row.trajectory, 0, under=other), row.trajectory.logprobs)
            for row in rows
        ]
        assert min(lies) > AGREES, "another version must not pass"
        values = [row.reward.value for row in rows if row.reward is not None and row.reward.value is not None]
        assert told["mean_reward"] == pytest.approx(sum(values) / len(values))
        assert told["pass_at"]["1"][0] == pytest.approx(sum(v >= 1 for v in values) / len(values))
    found = kept(stack.runs / job)
    assert [str(one.id) for one in found] == ["0.1", "0.3"]
    assert stack.get(f"/v1/jobs/{job}/evaluations")["items"] == [
        json.loads(line) for line in (stack.runs / job / "evaluations.jsonl").read_text().splitlines()
    ]
    gone = stack.cli("eval", job, "--version", "7")
    assert gone.returncode != 0
    assert "can be evaluated: 0.0, 0.1, 0.2, 0.3" in gone.stderr

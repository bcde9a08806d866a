"""Two turns with a tool, end to end: the reward rises, and what a tool said is in the record and never in the loss."""

from __future__ import annotations

import tomllib

import pytest
from guarantees import segment_files
from stack import ROOT, Stack

from syncline.runtime import segments
from syncline.trainer.batch import sample_of


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_model_begins_to_call_a_tool(stack: Stack) -> None:
    """The short form: 24 updates of the example. The whole of it passes 0.7."""
    spec = tomllib.loads((ROOT / "examples" / "calculator_tool.toml").read_text())
    spec["schedule"]["updates"] = spec["checkpoint"]["every"] = 24
    spec["batch"] |= {"groups": 8}
    job = stack.submit(spec)
    assert stack.wait(job, 240)["state"] == "succeeded"
    reward = stack.summary(job)["reward"]
    assert reward["first_fifth"] < 0.15
    assert reward["last_fifth"] > reward["first_fifth"] + 0.1
    rows = [row for file in segment_files(stack.runs / job) for row in segments.read(file).rows]
    called = [row.trajectory for row in rows if len(row.trajectory.turns) == 2]
    assert called, "nobody has called"
    for t in called:
        assert [s.kind for s in t.segments] == ["prompt", "sampled", "observed", "sampled"]
        _, first, observed, second = t.segments
        assert first.end == observed.start
        positions = set(sample_of(t, t.loss_mask, 1.0).positions)
        assert positions == {*range(first.start, first.end), *range(second.start, second.end)}
        assert len(t.loss_mask) == len(t.logprobs) == len(positions)
        assert t.turns[0].observed[0].content.endswith("=")
        assert t.turns[1].ended == "turns"

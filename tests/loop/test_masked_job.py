"""A job whose sampling is cut and whose loss corrects: both sides score the cut distribution, and it is recorded."""

from __future__ import annotations

from guarantees import segment_files
from specs import spec
from stack import Stack

from syncline.runtime import segments

UPDATES = 2
CUT = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "record_mask": True}


def test_importance_weights_of_a_cut_distribution_are_one_at_its_own_version(stack: Stack) -> None:
    job = stack.submit(
        spec(
            sampling=CUT,
            loss={"correction": {"kind": "truncate", "low": 0.5, "high": 2.0}},
            batch={"groups": 2},
            schedule={"updates": UPDATES, "max_lag": 0},
            rollout={"workers": 1},
        )
    )
    ended = stack.wait(job, 120)
    assert ended["state"] == "succeeded", ended["reason"]
    files = segment_files(stack.runs / job)
    assert len(files) == UPDATES
    sizes: set[int] = set()
    for path in files:
        update = segments.read(path)
        scores = segments.read_scores(segments.scores_path(path.parent, update.update))
        assert len(scores.rows) == len(update.rows) > 0
        for row, score in zip(update.rows, scores.rows, strict=True):
            t = row.trajectory
            assert t.mask is not None
            assert t.convention.logprob == "processed"
            sizes |= set(t.mask.sizes)
            assert max(map(abs, score.gap)) < 1e-4, "the trainer scores over the same ids"
            assert all(abs(weight - 1) < 1e-4 for weight in score.weights)
    assert max(sizes) <= CUT["top_k"]
    assert len(sizes) > 1, "top_p cut further, here more and there less"
    for record in stack.get(f"/v1/jobs/{job}/diagnostics")["items"]:
        assert "record_mask" in record["unmeasured"]["mismatch"]

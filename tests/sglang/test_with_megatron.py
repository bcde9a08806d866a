"""Whole jobs over REST with both production engines: SGLang samples, Megatron trains on two ranks.

One job per way of spreading the model, each with ten updates in either mode, a switch between them, and a server
that is killed.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

import pytest
from fleet import PYTHON
from guarantees import check, segment_files
from servers import kill_the_server
from specs import spec
from stack import Stack
from truth import every_span_is_true

from syncline.runtime import segments

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"SYNCLINE_SGLANG: there is no {PYTHON}"),
]

EACH = 10
"""Updates in either mode, at least."""
UPDATES = 2 * EACH + 2  # what is sampled when the switch is ordered is trained before it: one update or two
GROUP = 4
KILL_AT = 4
BASELINE = 1e-5
"""Nats: what an FP32 server and an FP32 trainer that hold the same version differ by."""


def job_of(parallel: dict[str, int], first: str, then: str, in_flight: str, replay: bool) -> dict[str, Any]:
    return spec(
        model={"name": "tiny-moe"},
        task={"environment": "characters", "options": {"game": "kind", "alphabet": 36}},
        batch={"groups": 4, "group_size": GROUP},
        optimizer={"lr": 3e-3},
        loss={"entropy": 0.1},
        sampling={"max_tokens": 32, "length": "lognormal", "length_median": 16, "length_sigma": 0.5},
        schedule={
            "mode": first,
            "updates": UPDATES,
            "max_lag": 2,
            "in_flight": in_flight,
            "switches": [{"at_update": EACH, "mode": then}],
        },
        rollout={"engine": "sglang", "workers": 1},
        trainer={"engine": "megatron", "parallel": parallel, "router_replay": replay},
        retention={"versions": 1000},
        limits={"activation_wait": 300.0, "worker_start": 300.0, "batch_wait": 600.0},
    )


def rewards_are_recorded(stack: Stack, job: str) -> None:
    """Of each trained trajectory in its segment; over REST of one in each group."""
    rows = [row for path in segment_files(stack.runs / job) for row in segments.read(path).rows]
    kept = {row.trajectory.trajectory: row.reward for row in rows if row.reward is not None}
    assert len(kept) == len(rows)
    assert {reward.state for reward in kept.values()} == {"scored"}
    assert len({reward.value for reward in kept.values()}) > 3, "the task tells responses apart"
    for update in range(1, UPDATES + 1):
        page = stack.get(f"/v1/jobs/{job}/trajectories?update={update}&state=trained")
        names = [brief["trajectory"] for brief in page["items"]]
        assert names
        assert set(names) <= set(kept)
        for name in names[::GROUP]:
            told = stack.get(f"/v1/jobs/{job}/trajectories/{name}")["reward"]
            assert (told["state"], told["value"]) == ("scored", kept[name].value)


def gaps_are_at_their_baseline(stack: Stack, job: str, replay: bool) -> None:
    """After every sync the server scores the canaries as the trainer did, at the version's own weights.

    Trained tokens that the server scored again under the version being updated say the same. Where they do not is a
    trainer that replays the routes of tokens sampled under an older version: those are not the server's any more.
    """
    versions = stack.get(f"/v1/jobs/{job}/versions")["items"]
    on_the_worker = [version["workers"]["w0"] for version in versions if "w0" in version["workers"]]
    synced = [path for path in on_the_worker if path["active"] is not None]
    assert len(synced) > EACH, "in colocated mode each version becomes active"
    assert max(path["canary_gap"] for path in synced) < BASELINE
    metrics = {update["update"]: update for update in stack.get(f"/v1/jobs/{job}/metrics")["items"]}
    measured = 0
    for record in stack.get(f"/v1/jobs/{job}/diagnostics")["items"]:
        mismatch = record["terms"].get(
            "mismatch"
        )  # absent where the worker went on to the next version first
        if mismatch is not None and (not replay or metrics[record["update"]]["lag_max"] == 0):
            assert mismatch["max"] < BASELINE, record
            measured += 1
        assert record["alarms"] == []
    assert measured >= EACH // 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("parallel", "first", "then", "in_flight", "replay"),
    [
        ({"tp": 2}, "disjoint", "colocated", "in_place", True),
        ({"dp": 2, "ep": 2}, "colocated", "disjoint", "drain", False),
    ],
    ids=["tp2", "ep2"],
)
def test_both_engines_in_both_modes(
    stack: Stack, parallel: dict[str, int], first: str, then: str, in_flight: str, replay: bool
) -> None:
    job = stack.submit(job_of(parallel, first, then, in_flight, replay))
    stack.wait_update(job, KILL_AT, 400)
    kill_the_server(stack)
    ended = stack.wait(job, 800)
    assert ended["state"] == "succeeded", ended["reason"]
    run = stack.runs / job
    check(run, stack.summary(job), UPDATES, max_lag=2)
    metrics = stack.get(f"/v1/jobs/{job}/metrics")["items"]
    modes = [update["mode"] for update in metrics]
    assert [mode for mode, _ in groupby(modes)] == [first, then]
    assert min(Counter(modes).values()) >= EACH
    for update in metrics:
        if update["lag_max"] == 0:
            assert min(update["route_agreement"]) >= 0.999, "both sides hold one version"
    rewards_are_recorded(stack, job)
    gaps_are_at_their_baseline(stack, job, replay)
    records = every_span_is_true(run)
    assert all(t.expert_ids is not None for t in records)
    crossed = any(len(t.spans) > 1 for t in records)
    assert crossed == (in_flight == "in_place"), "drain puts one version into a trajectory"

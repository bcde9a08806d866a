"""Log-normal lengths, three workers of which one is ten times slower, max lag 1: the bound holds in every policy."""

from __future__ import annotations

import os

import pytest
from guarantees import check
from specs import spec
from stack import Stack

# the short form; the long one is SYNCLINE_LAG_UPDATES=200
UPDATES = int(os.environ.get("SYNCLINE_LAG_UPDATES", "40"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["wait", "expire", "mask_old_tokens"])
def test_the_bound_holds_in_an_uneven_fleet(stack: Stack, policy: str) -> None:
    job = stack.submit(
        spec(
            sampling={"max_tokens": 256, "length": "lognormal", "length_median": 8, "length_sigma": 1.0},
            schedule={"mode": "disjoint", "updates": UPDATES, "max_lag": 1, "lag_policy": policy},
            rollout={"workers": 3, "pace": [1.0, 1.0, 0.1]},
            checkpoint={"every": 50},
        )
    )
    assert stack.wait(job, 800)["state"] == "succeeded"
    summary = stack.summary(job)
    check(stack.runs / job, summary, UPDATES, max_lag=1)
    assert summary["lag"]["max"] <= summary["lag"]["bound"] == 1
    cost = summary["lag_policy"]
    assert cost["policy"] == policy
    assert cost["waited_seconds"] >= 0
    assert set(cost["length"]) >= {"trained_mean", "dropped_mean"}
    if policy == "wait":
        assert summary["ledger"]["expired"] == 0, "`wait` discards nothing"
        assert summary["ledger"]["filtered"] == 0

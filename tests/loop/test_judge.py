"""A judge that is slow, fails, hangs and dies: the run ends, the judge is kept busy, and no score is invented."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from guarantees import check, segment_files
from judging import SlowJudge, Use, rewarded, use
from slow_judge import poison
from specs import spec
from stack import Stack

from syncline.contract.token_path import PUBLISHED
from syncline.runtime import segments
from syncline.runtime.trace_store import spans_of


@pytest.fixture
def judges(tmp_path: Path) -> Iterator[Callable[[float, int], SlowJudge]]:
    started: list[SlowJudge] = []

    def start(seconds: float, slots: int) -> SlowJudge:
        started.append(SlowJudge(tmp_path, seconds, slots))
        return started[-1]

    yield start
    for judge in started:
        judge.stop()


def run(
    stack: Stack, judge: SlowJudge, updates: int, *, batch: int, groups: int, timeout: float, patience: float
) -> Use:
    """A whole job under the judge, which dies once on the way. How the judge was used."""
    reward = {
        "source": "http",
        "url": judge.url,
        "timeout": timeout,
        "retries": 2,
        "batch": batch,
        "parallel": judge.slots,
    }
    job = stack.submit(
        spec(
            reward=reward,
            batch={"groups": groups},
            schedule={"mode": "disjoint", "updates": updates, "max_lag": 2},
        )
    )
    stack.wait_update(job, updates // 2, patience)
    judge.die()
    status = stack.wait(job, patience)
    assert status["state"] == "succeeded", status
    check(stack.runs / job, stack.summary(job), updates, max_lag=2)
    no_score_is_invented(stack, job, judge)
    used = use(judge, batch, stack.runs / "traces.sqlite", job)
    print(used, judge.down)  # noqa: T201 - with -s, the figures
    assert used.full > 5 * judge.seconds, used
    assert used.share >= 0.85, used
    return used


def no_score_is_invented(stack: Stack, job: str, judge: SlowJudge) -> None:
    """What was stored is what the judge said of that very text; what always fails is unscored."""
    given = judge.given()
    told = rewarded(stack.runs / "traces.sqlite", job)
    names = [str(span.attributes["trajectory"]) for span in told]
    assert len(names) == len(set(names)), "a trajectory was rewarded twice"
    scored = {
        n: float(str(s.attributes["reward"]))
        for n, s in zip(names, told, strict=True)
        if s.attributes["state"] == "scored"
    }
    unscored = {n for n, s in zip(names, told, strict=True) if s.attributes["state"] == "unscored"}
    assert len(scored) + len(unscored) == len(names)
    assert all(reward in given[name] for name, reward in scored.items())
    assert {name for name in names if poison(name)} <= unscored
    assert unscored & {name for name in names if poison(name)}
    rows = [row for file in segment_files(stack.runs / job) for row in segments.read(file).rows]
    for row in rows:
        name = row.trajectory.trajectory
        assert row.reward is not None
        assert (row.reward.state, row.reward.value) == ("scored", scored[name])
        assert given[name][scored[name]] == row.trajectory.text  # the attempt that is trained
        assert row.reward.judge == f"http {judge.url} slow/1"


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_judge_that_is_slow_fails_and_dies(stack: Stack, judges: Callable[[float, int], SlowJudge]) -> None:
    """The short form: two seconds a request instead of twenty."""
    run(stack, judges(2.0, 4), 6, batch=2, groups=4, timeout=3.0, patience=120)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_judge_that_is_not_there_holds_a_batch_for_its_budget_and_no_longer(stack: Stack) -> None:
    reward = {"source": "http", "url": "http://127.0.0.1:9/judge", "timeout": 2.0, "budget": 4.0, "batch": 4}
    job = stack.submit(spec(reward=reward, schedule={"updates": 5}))
    status = stack.wait(job, 150)
    assert status["state"] == "failed"
    assert "no scored trajectory" in status["reason"]
    assert "not judged within reward.budget of 4 s" in status["reason"]
    assert "ConnectError" in status["reason"]
    store = stack.runs / "traces.sqlite"
    told = {str(span.attributes["trajectory"]): span for span in rewarded(store, job)}
    assert len(told) >= 3 * 16
    assert {span.attributes["state"] for span in told.values()} == {"unscored"}
    held = [
        (told[str(span.attributes["trajectory"])].end_ns - span.end_ns) / 1e9
        for span in spans_of(store, job=job, names=[PUBLISHED.name])
        if span.attributes["trajectory"] in told
    ]
    assert 3.5 <= min(held) <= max(held) <= 8.0, (min(held), max(held))


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_judge_that_takes_twenty_seconds(stack: Stack, judges: Callable[[float, int], SlowJudge]) -> None:
    """The whole of it: twenty seconds, one request in ten fails, one death."""
    used = run(stack, judges(20.0, 8), 6, batch=2, groups=8, timeout=30.0, patience=700)
    assert used.per_second >= 0.85 * used.limit, used  # in the short form one answer more or less is too much

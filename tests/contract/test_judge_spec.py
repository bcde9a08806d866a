"""What a job spec may ask of an HTTP judge."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems

JUDGE = {"source": "http", "url": "http://judge:8900/judge"}


def found(reward: dict[str, Any], **limits: float) -> list[tuple[str, str]]:
    spec = {"name": "judged", "model": {"name": "tiny-dense"}, "reward": reward, "limits": limits}
    return [(problem.path, problem.hint) for problem in problems(JobSpec.model_validate(spec))]


@pytest.mark.parametrize("more", [{}, {"batch": 32, "parallel": 4, "timeout": 60.0, "budget": 500.0}])
def test_a_judge(more: dict[str, Any]) -> None:
    assert not found(JUDGE | more)


def test_within_is_half_of_the_wait_for_a_batch() -> None:
    reward = JobSpec.model_validate({"name": "judged", "model": {"name": "m"}, "reward": JUDGE}).reward
    assert reward.within(600.0) == 300.0


@pytest.mark.parametrize("key", ["batch", "parallel", "breaker", "budget"])
def test_keys_of_a_judge_mean_nothing_without_one(key: str) -> None:
    value = 100.0 if key == "budget" else 2
    assert found({key: value}) == [(f"reward.{key}", "leave it out or use source 'http'")]


def test_a_budget_ends_before_the_job_would() -> None:
    assert found(JUDGE | {"budget": 600.0}) == [
        ("reward.budget", "less than 600, or a longer limits.batch_wait")
    ]
    assert not found(JUDGE | {"budget": 600.0}, batch_wait=601.0)


def test_one_request_fits_into_the_budget() -> None:
    assert found(JUDGE | {"timeout": 20.0}, batch_wait=30.0) == [
        ("reward.timeout", "less than 15, or a longer reward.budget")
    ]


@pytest.mark.parametrize("url", ["http://:80/x", "http://h:x/", "http://h:70000/", "http://[h/"])
def test_a_url_that_nobody_can_be_asked_at(url: str) -> None:
    assert found(JUDGE | {"url": url}) == [("reward.url", "http://host:port/path")]


@pytest.mark.parametrize(
    "url", ["http://user:canary@[h/", "http://:canary@:80/", "http://h/?token=canary", "http://user@h:x/"]
)
def test_a_secret_in_a_url_is_refused_though_it_be_a_bad_one(url: str) -> None:
    told = found(JUDGE | {"url": url})
    assert {path for path, _ in told} == {"reward.url"}
    assert all(hint for _, hint in told)


def test_an_option_that_is_no_url_is_told_once() -> None:
    task = {"environment": "http", "options": {"url": "http://[h/"}}
    spec = {"name": "asked", "model": {"name": "tiny-dense"}, "task": task}
    told = [(problem.path, problem.hint) for problem in problems(JobSpec.model_validate(spec))]
    assert told == [("task.options.url", "http://host:port/path")]

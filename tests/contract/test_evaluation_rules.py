"""What an evaluation may ask: the training job's policy, and prompts that training never draws."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.contract import evaluation_rules as rules
from syncline.contract.evaluation_spec import HELD_OUT, EvaluationSpec
from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems

JOB, VERSION = "j0123456789", "0.3"


def training(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "t", "model": {"name": "tiny-dense"}, **changes})


def asked(**changes: Any) -> EvaluationSpec:
    return EvaluationSpec.model_validate({"job": JOB, "version": VERSION, **changes})


FILE = {"environment": "jsonl", "options": {"file": "train.jsonl"}}
GYM = {"environment": "reasoning_gym", "options": {"dataset": "chain_sum", "size": 100}}

LETTERS = {"environment": "characters", "options": {"game": "reverse"}}
MIX = {"environment": "mix", "parts": (LETTERS, FILE)}
ENDLESS_MIX = {"environment": "mix", "parts": (LETTERS, {"environment": "calculator"})}


def test_an_evaluation_has_the_policy_of_its_training_job() -> None:
    job = training(
        sampling={"temperature": 0.7, "max_tokens": 9}, schedule={"mode": "disjoint", "updates": 9}
    )
    made = rules.of(job, asked(samples=1), {}, None)
    assert problems(made) == []
    assert list(rules.between(made, job)) == []
    assert made.sampling == job.sampling
    assert made.versions_of("j9876543210") == JOB
    assert job.versions_of(JOB) == JOB
    colder = made.model_copy(update={"sampling": training().sampling})
    assert [p.path for p in rules.between(colder, job)] == ["sampling"]
    assert [p.path for p in rules.between(made, made)] == ["evaluation.job"]


@pytest.mark.parametrize(
    ("task", "drawn", "part", "options", "seed", "refused"),
    [
        ({}, {}, {}, {}, None, ""),
        ({}, {}, {"first": 0}, {}, None, "evaluation.first"),
        ({}, {}, {"first": HELD_OUT - 1}, {}, None, "evaluation.first"),
        ({}, {"first": HELD_OUT}, {}, {}, None, "evaluation.first"),
        ({}, {"first": 1000}, {"first": 900}, {}, None, ""),
        ({}, {"first": 1000}, {"first": 950}, {}, None, "evaluation.first"),
        ({}, {}, {"first": 0}, {}, 7, ""),
        (FILE, {}, {}, {}, None, "evaluation.first"),
        (FILE, {}, {"first": 0}, {}, 7, "seeds.data"),
        (FILE, {}, {"first": 0}, {"file": "held.jsonl"}, None, ""),
        (FILE, {"first": 64}, {"first": 0}, {}, None, ""),
        (FILE, {"first": 63}, {"first": 0}, {}, None, "evaluation.first"),
        (FILE, {"last": 99}, {"first": 100}, {}, None, ""),
        (FILE, {"last": 100}, {"first": 100}, {}, None, "evaluation.first"),
        (GYM, {}, {}, {}, None, "evaluation.first"),
        (GYM, {}, {"first": 0}, {}, 7, ""),
        (MIX, {}, {}, {}, None, "evaluation.first"),
        (MIX, {}, {"first": 0}, {}, 7, "seeds.data"),
        (ENDLESS_MIX, {}, {}, {}, None, ""),
    ],
)
def test_prompts_are_held_out_or_refused(
    task: dict[str, Any],
    drawn: dict[str, Any],
    part: dict[str, Any],
    options: dict[str, Any],
    seed: int | None,
    refused: str,
) -> None:
    job = training(task=task, prompts=drawn)
    made = rules.of(job, asked(prompts=64, **part), options, seed)
    assert [p.path for p in rules.held_out(made, job)] == ([refused] if refused else [])


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"every": 0}, "evaluation.every"),
        ({"every": 2, "job": JOB}, "evaluation.job"),
        ({"every": 2, "k": (1, 8)}, "evaluation.k"),
        ({"every": 2, "k": (4, 1)}, "evaluation.k"),
        ({"every": 2, "first": 0}, "evaluation.first"),
    ],
)
def test_a_training_job_that_evaluates_itself_says_what_it_can(part: dict[str, Any], path: str) -> None:
    assert [p.path for p in problems(training(evaluation=part))] == [path]


def test_kinds_say_what_they_need() -> None:
    assert problems(training(evaluation={"every": 2})) == []
    without = training(kind="evaluate")
    assert [p.path for p in problems(without)] == ["evaluation"]
    other = rules.of(training(), asked(), {}, None).model_copy(update={"batch": training().batch})
    assert [p.path for p in problems(other)] == ["batch"]

"""Options are judged at submit: quickly, without the libraries, with the nearest right key."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from syncline.contract.job import RewardSpec, TaskSpec
from syncline.environments.environment import load, validate


@pytest.mark.parametrize(
    ("environment", "options", "path", "told"),
    [
        ("characters", {"lenght": 3}, "task.options.lenght", "did you mean 'length'?"),
        ("characters", {"game": "revers"}, "task.options.game", "did you mean 'reverse'?"),
        ("characters", {"length": "3"}, "task.options.length", "Expected `int`, got `str`"),
        ("characters", {"length": 0}, "task.options.length", ">= 1"),
        ("characters", {"alphabet": 40}, "task.options.alphabet", "<= 36"),
        ("characters", {"alphabet": "aab"}, "task.options.alphabet", "repeats ['a']"),
        ("characters", {"alphabet": "aB"}, "task.options.alphabet", "holds ['B']"),
        ("reasoning_gym", {}, "task.options.dataset", "is missing"),
        ("reasoning_gym", {"dataset": "chain_sums"}, "task.options.dataset", "did you mean 'chain_sum'?"),
        ("reasoning_gym", {"dataset": "qqqqqqqq"}, "task.options.dataset", "reasoning_gym_options.json"),
        ("reasoning_gym", {"dataset": "gcd", "min_value": "a"}, "task.options.min_value", "got `str`"),
        ("reasoning_gym", {"dataset": "gcd", "min_valu": 1}, "task.options.min_valu", "'min_value'"),
        ("reasoning_gym", {"dataset": "gcd", "seed": 1}, "task.options.seed", "no such option"),
        ("reasoning_gym", {"dataset": "gcd", "size": 0}, "task.options.size", ">= 1"),
        ("jsonl", {}, "task.options.file", "is missing"),
        ("jsonl", {"file": "../x.jsonl"}, "task.options.file", "regex"),
        ("jsonl", {"file": "/etc/x.jsonl"}, "task.options.file", "regex"),
        ("jsonl", {"file": "a.txt"}, "task.options.file", "regex"),
        ("jsonl", {"fil": "a.jsonl"}, "task.options.fil", "did you mean 'file'?"),
    ],
)
def test_problem_names_option_and_remedy(
    environment: Any, options: dict[str, Any], path: str, told: str
) -> None:
    task = TaskSpec(environment=environment, options=options)
    found = {problem.path: f"{problem.message} {problem.hint}" for problem in validate(task, RewardSpec())}
    assert told in found[path]
    with pytest.raises(ValueError, match=path):
        load(task, 0)


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ("characters", {}),
        ("characters", {"game": "sort", "length": 6, "alphabet": "cab1"}),
        ("reasoning_gym", {"dataset": "chain_sum", "min_terms": 2, "size": 10, "instruction": "Go."}),
        ("reasoning_gym", {"dataset": "spell_backward"}),
        ("jsonl", {"file": "sums.jsonl"}),
    ],
)
def test_good_options_have_no_problem(environment: Any, options: dict[str, Any]) -> None:
    assert validate(TaskSpec(environment=environment, options=options), RewardSpec()) == []


def test_every_problem_is_told_at_once() -> None:
    task = TaskSpec(options={"gme": "sort", "length": 0, "alphabet": 1})
    assert len(validate(task, RewardSpec())) == 3


def test_validate_imports_no_library() -> None:
    script = (
        "import sys\n"
        "from syncline.contract.job import RewardSpec, TaskSpec\n"
        "from syncline.environments.environment import validate\n"
        "task = TaskSpec(environment='reasoning_gym', options={'dataset': 'chain_sum', 'min_term': 1})\n"
        "assert validate(task, RewardSpec())\n"
        "heavy = {'reasoning_gym', 'torch', 'redis', 'numpy', 'celery', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

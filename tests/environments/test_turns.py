"""Environments with several turns, and the adapters: what is asked, answered and scored."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncline.contract.job import RewardSpec, TaskSpec
from syncline.environments.environment import Environment, Turn, load, validate
from syncline.environments.turns import Message, parse_calls


def loaded(environment: str, seed: int = 0, **options: Any) -> Environment:
    return load(TaskSpec.model_validate({"environment": environment, "options": options}), seed)


def wrong(environment: str, **options: Any) -> list[str]:
    task = TaskSpec.model_validate({"environment": environment, "options": options})
    return [problem.path for problem in validate(task, RewardSpec())]


def test_the_calculator_gives_credit_by_turn() -> None:
    env = loaded("calculator", digits="123")
    operands = env.prompt(5).meta["operands"]
    right, other = env.prompt(5).meta["answer"], "".join(reversed("".join(operands)))
    call = Turn(text=f"!{operands}")
    step = env.step(5, [call])
    assert [message.content for message in step.observed] == [f"{right}="]
    asked = msgspec.structs.replace(call, observed=step.observed)
    assert env.score_turns(5, [asked, Turn(text=right)]) == pytest.approx(1.0)
    assert env.score_turns(5, [asked, Turn(text="x")]) == pytest.approx(0.5)
    assert env.score_turns(5, [Turn(text=f"{right}")]) == 0.0
    assert env.step(5, [asked, Turn(text=right)]).done
    assert env.step(5, [Turn(text="what")]).done
    if other != operands:
        assert env.score_turns(5, [Turn(text=f"!{other}")]) == pytest.approx(0.2)
    told = (Message(role="tool", content="9="),)
    false = Turn(text="!99", observed=told)
    assert env.score_turns(5, [false, Turn(text="9")]) == pytest.approx(0.4), (
        "repeated, and not the sum asked for"
    )


def test_a_composite_keeps_its_shares_and_reads_each_data_set_in_order() -> None:
    env = loaded("composite", datasets=["chain_sum", "leg_counting", "basic_arithmetic"], weights=[2, 1, 1])
    drawn = [env.prompt(i).meta["dataset"] for i in range(1024)]
    assert Counter(drawn) == {"chain_sum": 512, "leg_counting": 256, "basic_arithmetic": 256}
    alone = loaded("reasoning_gym", dataset="leg_counting")
    mine = [env.prompt(i) for i in range(200) if drawn[i] == "leg_counting"]
    assert [prompt.text for prompt in mine] == [alone.prompt(i).text for i in range(len(mine))]
    first = drawn.index("leg_counting")
    assert env.score(first, str(env.prompt(first).meta["answer"])) == 1.0
    again = loaded("composite", datasets=["chain_sum", "leg_counting", "basic_arithmetic"], weights=[2, 1, 1])
    assert [again.prompt(i).text for i in range(30)] == [env.prompt(i).text for i in range(30)]


def test_a_composite_is_checked_at_submit() -> None:
    assert wrong("composite", datasets=["chain_sum", "leg_counting"], weights=[1.0]) == [
        "task.options.weights"
    ]
    assert wrong("composite", datasets=["chain_sum"], **{"leg_counting.min": 3})
    assert wrong("composite", datasets=["chain_some"]) == ["task.options.dataset"]
    assert not wrong("composite", datasets=["chain_sum"], **{"chain_sum.max_terms": 3})


def test_a_users_function_makes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    env = loaded("python", 7, function="environments.own_environment:guess", most=2)
    assert env.multi_turn
    assert not env.step(0, [Turn(text="3")]).done
    assert env.step(0, [Turn(text="3"), Turn(text="4")]).done
    assert env.score_turns(0, [Turn(text="3"), Turn(text="7")]) == 0.5
    with pytest.raises(ValueError, match="has no name, size"):
        loaded("python", function="environments.own_environment:nothing")
    with pytest.raises(ValueError, match="no such function"):
        loaded("python", function="environments.own_environment:absent")
    assert wrong("python", function="not a function") == ["task.options.function"]


def test_calls_are_read_from_a_turn_and_what_is_none_is_left_out() -> None:
    text = (
        'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> <tool_call>{"name": 3}</tool_call>'
    )
    assert [(call.tool, call.arguments) for call in parse_calls(text)] == [("add", {"a": 1})]
    assert parse_calls('<tool_call>{"name": "add"}') == ()


def test_a_taskset_of_verifiers_gives_prompts_tools_and_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert wrong("verifiers", taskset="environments.toy_taskset") == ["task.options.taskset"]
    env = loaded("verifiers", taskset="toy_taskset", size=10)
    assert env.size == 10
    assert env.prompt(3).text == "3+1="
    text = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 1}}</tool_call>'
    turn = Turn(text=text, calls=parse_calls(text))
    step = env.step(3, [turn])
    assert [message.content for message in step.observed] == ["4"]
    turn = msgspec.structs.replace(turn, observed=step.observed)
    assert env.step(3, [turn, Turn(text="4")]).done
    assert env.score_turns(3, [turn, Turn(text="4")]) == 1.0
    assert env.score(3, "5") == 0.0

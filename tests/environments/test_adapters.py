"""Adapters to servers and to math-verify: what they ask, what answers mean, and what is no answer."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from environment_servers import COUNTS, FAILING, counting, guessing

from syncline.contract.job import RewardSpec, TaskSpec
from syncline.environments.environment import (
    Environment,
    Step,
    Turn,
    load,
    reaches_network,
    runs_foreign_code,
    validate,
)
from syncline.environments.turns import Message

FOLDER = Path(__file__).resolve().parents[2] / "services" / "syncline" / "environments"


def task(environment: str, **options: Any) -> TaskSpec:
    return TaskSpec.model_validate({"environment": environment, "options": options})


def loaded(environment: str, seed: int = 0, **options: Any) -> Environment:
    return load(task(environment, **options), seed)


def test_an_adapter_has_under_100_lines() -> None:
    literal = TaskSpec.model_fields["environment"].annotation
    for name in ast.literal_eval(str(literal).removeprefix("typing.Literal")):
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 100, name


# ---- an HTTP server of the user's own
def test_a_server_makes_prompts_takes_steps_and_scores() -> None:
    with guessing() as url:
        env = loaded("http", 3, url=f"{url}/game", multi_turn=True, size=7, version="2")
        assert (env.name, env.size, env.multi_turn) == (f"http {url}/game 2", 7, True)
        prompt = env.prompt(4)
        assert (prompt.text, prompt.meta) == ("guess 4:", {"answer": "7"})
        assert env.prompt(4) == prompt
        assert COUNTS["/game/prompt"] == 1, "members of a group ask for the same one"
        wrong = Turn(text="1")
        assert env.step(4, [wrong]) == Step(done=False, observed=(Message(role="tool", content="no"),))
        assert env.step(4, [wrong, Turn(text="7")]).done
        assert env.score_turns(4, [wrong, Turn(text="7")]) == 0.5
        assert env.score(4, "?") is None
        assert not loaded("http", url=f"{url}/game").multi_turn
        assert loaded("http", url=f"{url}/game").step(0, [wrong]).done


def test_a_servers_trouble_is_told_from_its_faults() -> None:
    with guessing() as url:
        env = loaded("http", url=f"{url}/game")
        for status in (503, 429):
            FAILING["/game/score"] = [status]
            with pytest.raises(ConnectionError, match=f"HTTP {status}"):
                env.score(0, "0")
        FAILING["/game/score"] = [404]
        with pytest.raises(ValueError, match="HTTP 404"):
            env.score(0, "0")
        assert env.score(0, "0") == 1.0
        FAILING["/game/prompt"] = [500]
        with pytest.raises(ValueError, match=r"prompt 9: .*HTTP 500"):
            env.prompt(9)
        assert env.prompt(9).text == "guess 9:", "trouble is not remembered"
        with pytest.raises(ValueError, match="unknown field `nothing`"):
            loaded("http", url=f"{url}/elsewhere").score(0, "0")
    with pytest.raises(ConnectionError, match="ConnectError"):
        env.score(0, "0")


# ---- OpenEnv
def test_a_session_of_openenv_is_played_again_for_each_step() -> None:
    pytest.importorskip("websockets", reason="the extra `openenv` is not installed")
    with counting() as url:
        env = loaded("openenv", 1, url=url, observation="left", size=3)
        start = int(str(env.prompt(1).text))
        assert start == (1_000_003 + 1) % 5 + 2
        assert env.prompt(4).text == env.prompt(1).text
        turns = [Turn(text="-")]
        assert env.step(1, turns) == Step(
            done=False, observed=(Message(role="user", content=str(start - 1)),)
        )
        assert env.step(1, turns) == env.step(4, turns), "a step may be asked for twice"
        turns = [Turn(text="x"), *([Turn(text="-")] * start)]
        assert env.step(1, turns).done
        assert env.score_turns(1, turns) == start - 0.5
        with pytest.raises(ValueError, match="EXECUTION_ERROR: done"):
            env.step(1, [*turns, Turn(text="-")])
        whole = loaded("openenv", 1, url=url, action="")
        assert '"left":' in str(whole.prompt(1).text)
        assert (
            whole.step(1, [Turn(text='{"message": "-"}')])
            .observed[0]
            .content.startswith(f'{{"left":{start - 1}')
        )
        assert f'"left":{start}' in whole.step(1, [Turn(text="no json")]).observed[0].content
        with pytest.raises(ValueError, match="has no 'right', but"):
            loaded("openenv", url=url, observation="right").prompt(0)


def test_a_full_or_absent_openenv_server_is_trouble_of_the_moment() -> None:
    pytest.importorskip("websockets", reason="the extra `openenv` is not installed")
    with counting() as url:
        env = loaded("openenv", url=url)
        COUNTS["full"] = 1
        with pytest.raises(ConnectionError, match="CAPACITY_REACHED"):
            env.step(0, [Turn(text="-")])
        assert not env.step(0, [Turn(text="-")]).done
        with pytest.raises(ConnectionError, match="ConnectionClosed"):
            loaded("openenv", url=f"{url}/elsewhere").step(0, [])
    with pytest.raises(OSError, match="refused"):
        env.step(0, [Turn(text="-")])
    with pytest.raises(ValueError, match=r"prompt 0: .*refused"):
        env.prompt(0)


# ---- answers that are worth the same
def test_math_verify_judges_by_worth_and_exact_by_sign(tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    (tmp_path / "d.jsonl").write_text('{"prompt": "0.5 as a fraction?", "answer": "$\\\\frac{1}{2}$"}\n')
    by_worth = load(task("jsonl", file="d.jsonl", judge="math_verify"), 0, tmp_path)
    by_sign = load(task("jsonl", file="d.jsonl"), 0, tmp_path)
    assert by_worth.name == "jsonl/1 d.jsonl math_verify"
    for text in ("0.5", "The answer is $2/4$.", r"\boxed{\frac{1}{2}}"):
        assert (by_worth.score(0, text), by_sign.score(0, text)) == (1.0, 0.0)
    for text in ("0.6", "", "no number"):
        assert by_worth.score(0, text) == 0.0
    assert by_sign.score(0, "$\\frac{1}{2}$ ") == 1.0


def test_who_reaches_the_network_and_whose_code_has_a_process_of_its_own() -> None:
    server = task("http", url="http://a:1")
    assert reaches_network(server)
    assert reaches_network(task("openenv", url="ws://a:1"))
    assert runs_foreign_code(server)
    assert runs_foreign_code(task("jsonl", file="d.jsonl", judge="math_verify"))
    assert not runs_foreign_code(task("jsonl", file="d.jsonl"))
    parts = ({"environment": "calculator"}, {"environment": "jsonl", "options": {"file": "d.jsonl"}})
    assert not runs_foreign_code(TaskSpec.model_validate({"environment": "mix", "parts": parts}))
    assert runs_foreign_code(
        TaskSpec.model_validate(
            {
                "environment": "mix",
                "parts": (*parts, {"environment": "http", "options": {"url": "http://a:1"}}),
            }
        )
    )


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (task("http"), "task.options.url"),
        (task("http", url="ftp://a"), "task.options.url"),
        (task("http", url="http://a", turns=2), "task.options.turns"),
        (task("openenv", url="http://a"), "task.options.url"),
        (task("openenv", url="ws://a", timeout=0.0), "task.options.timeout"),
        (task("jsonl", file="d.jsonl", judge="math"), "task.options.judge"),
    ],
)
def test_wrong_options_are_refused_at_submit(given: TaskSpec, path: str) -> None:
    assert [problem.path for problem in validate(given, RewardSpec())] == [path]

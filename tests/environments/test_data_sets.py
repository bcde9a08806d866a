"""JSONL files and reasoning-gym: items by index, epochs, scores, and errors that name the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from syncline.contract.job import TaskSpec
from syncline.environments import reasoning_gym_table
from syncline.environments.environment import Environment, load
from syncline.environments.reasoning_gym_table import installed


def lines(root: Path, *rows: str) -> Environment:
    (root / "d.jsonl").write_text("\n".join(rows) + "\n")
    return load(TaskSpec(environment="jsonl", options={"file": "d.jsonl"}), 0, root)


def gym(dataset: str, **options: str | int) -> Environment:
    return load(TaskSpec(environment="reasoning_gym", options={"dataset": dataset, **options}), 5)


# ---- jsonl ----------------------------------------------------------------------------------------------------
def test_items_epochs_and_exact_match(tmp_path: Path) -> None:
    environment = lines(
        tmp_path,
        '{"prompt": "2+2=", "answer": "4", "level": 1}',
        '{"messages": [{"role": "user", "content": "hi"}], "answer": " hello "}',
    )
    assert (environment.name, environment.size) == ("jsonl/1 d.jsonl", 2)
    assert environment.prompt(0).text == "2+2="
    assert environment.prompt(0).meta == {"level": 1, "answer": "4", "epoch": 0}
    again = environment.prompt(2)
    assert (again.text, again.meta["epoch"]) == ("2+2=", 1)
    chat = environment.prompt(3)
    assert (chat.text, chat.plain()) == (None, "hi")
    assert chat.chat() == [{"role": "user", "content": "hi"}]
    assert environment.score(0, " 4\n") == 1.0
    assert environment.score(0, "44") == 0.0
    assert environment.score(1, "hello") == 1.0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ('{"prompt": "x"}', "missing required field `answer`"),
        ('{"answer": "x"}', "give one of prompt and messages"),
        ('{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "answer": "x"}', "give one of"),
        ('{"prompt": 3, "answer": "x"}', "Expected `str"),
        ('{"messages": [{"role": "king", "content": "x"}], "answer": "x"}', "king"),
        ("", "truncated"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, row: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"d\.jsonl line 2: ") as caught:
        lines(tmp_path, '{"prompt": "x", "answer": "y"}', row, '{"prompt": "x", "answer": "y"}')
    assert reason in str(caught.value)


def test_file_must_lie_under_the_root(tmp_path: Path) -> None:
    outside = tmp_path / "secret.jsonl"
    outside.write_text('{"prompt": "x", "answer": "y"}\n')
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.jsonl").symlink_to(outside)
    for name, reason in [("link.jsonl", "leads out of the data root"), ("none.jsonl", "there is no file")]:
        with pytest.raises(ValueError, match=reason):
            load(TaskSpec(environment="jsonl", options={"file": name}), 0, root)
    (root / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        load(TaskSpec(environment="jsonl", options={"file": "empty.jsonl"}), 0, root)


def test_data_root_comes_from_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    monkeypatch.setenv("SYNCLINE_DATA", str(tmp_path))
    assert load(TaskSpec(environment="jsonl", options={"file": "d.jsonl"}), 0).size == 1


def test_example_file_loads() -> None:
    root = Path(__file__).parents[2] / "examples" / "data"
    environment = load(TaskSpec(environment="jsonl", options={"file": "sums.jsonl"}), 0, root)
    assert environment.size is not None
    for index in range(environment.size):
        assert environment.score(index, environment.prompt(index).meta["answer"]) == 1.0


# ---- reasoning-gym --------------------------------------------------------------------------------------------
def test_gym_items_are_fixed_by_seed_and_index() -> None:
    one, two = gym("chain_sum", size=20), gym("chain_sum", size=20)
    assert [one.prompt(i).text for i in range(20)] == [two.prompt(i).text for i in range(20)]
    other = load(TaskSpec(environment="reasoning_gym", options={"dataset": "chain_sum", "size": 20}), 6)
    assert [one.prompt(i).text for i in range(20)] != [other.prompt(i).text for i in range(20)]
    wrapped = one.prompt(23)
    assert (wrapped.text, wrapped.meta["epoch"]) == (one.prompt(3).text, 1)
    assert one.name.startswith("reasoning_gym/")


def test_gym_scores_with_the_librarys_verifier() -> None:
    environment = gym("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    answer = environment.prompt(4).meta["answer"]
    assert environment.score(4, f" {answer}\n") == 1.0
    assert environment.score(4, f"I think <answer>{answer}</answer>") == 1.0
    assert environment.score(4, "no idea") == pytest.approx(0.0, abs=0.05)


def test_gym_gives_plain_text_and_chat_with_the_instruction() -> None:
    prompt = gym("chain_sum", instruction="Only the number.").prompt(0)
    assert prompt.text is not None
    assert prompt.text.endswith("\nOnly the number.")
    assert prompt.chat() == [{"role": "user", "content": prompt.text}]
    json.dumps(prompt.meta)


def test_gym_value_out_of_range_is_the_users_error() -> None:
    with pytest.raises(ValueError, match=r"task.options: chain_sum: min_terms must be positive"):
        gym("chain_sum", min_terms=-1)


def test_gym_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("chain_sum", "sudoku", "rush_hour"):
        environment = gym(name, size=2)
        environment.score(0, environment.prompt(0).meta["answer"] or "")
    assert capfd.readouterr() == ("", "")


def test_table_is_that_of_the_installed_library() -> None:
    assert reasoning_gym_table.table() == installed()

"""Character games: right answers, dense rewards, the same prompts in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.contract.job import TaskSpec
from syncline.environments.environment import Environment, Turn, load

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"


def game(name: str, seed: int = 0, **options: str | int) -> Environment:
    return load(TaskSpec(options={"game": name, **options}), seed)


def first(environment: Environment, symbols: str) -> int:
    """The first index at which these symbols are shown."""
    return next(i for i in range(100_000) if environment.prompt(i).meta["symbols"] == symbols)


@pytest.mark.parametrize(
    ("name", "answer"), [("reverse", "ach"), ("copy", "hca"), ("sort", "ach"), ("successor", "adb")]
)
def test_answers(name: str, answer: str) -> None:
    environment = game(name, length=3, alphabet=8)
    index = first(environment, "hca")
    prompt = environment.prompt(index)
    assert prompt.text == f"{name}:hca="
    assert prompt.meta["answer"] == answer
    assert environment.score(index, answer) == 1.0


def test_sort_and_successor_follow_the_alphabet_given() -> None:
    backwards = game("sort", length=2, alphabet="cba")
    assert backwards.score(first(backwards, "ac"), "ca") == 1.0
    round_trip = game("successor", length=2, alphabet="xy1")
    assert round_trip.score(first(round_trip, "1x"), "xy") == 1.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("ach", 1.0),
        ("acx", 2 / 3),
        ("ac", 2 / 3),
        ("achh", 3 / 4),
        ("achach", 1 / 2),
        ("", 0.0),
        ("zzz", 0.0),
    ],
)
def test_reward_is_the_share_of_right_positions(text: str, reward: float) -> None:
    environment = game("reverse", length=3, alphabet=8)
    assert environment.score(first(environment, "hca"), text) == pytest.approx(reward)


def test_kind_takes_any_symbol_of_the_kind() -> None:
    environment = game("kind", length=4, alphabet="a1")
    letter, digit = first(environment, "a"), first(environment, "1")
    assert environment.prompt(digit).text == "kind:1="
    assert environment.score(letter, "qwer") == 1.0
    assert environment.score(digit, "9081") == 1.0
    assert environment.score(digit, "90xy") == 0.5
    assert environment.score(letter, "ab:=") == 0.5
    assert environment.score(letter, "²²²²") == 0.0  # `isdigit` alone would take it
    assert environment.score(letter, environment.prompt(letter).meta["answer"]) == 1.0


@given(
    name=st.sampled_from(["reverse", "copy", "sort", "successor", "kind"]),
    length=st.integers(1, 12),
    seed=st.integers(0, 2**31 - 1),
    index=st.integers(0, 10**9),
    text=st.text(max_size=20),
)
def test_any_response_scores_between_0_and_1(
    name: str, length: int, seed: int, index: int, text: str
) -> None:
    environment = game(name, seed, length=length, alphabet=10)
    reward = environment.score(index, text)
    assert reward is not None
    assert 0.0 <= reward <= 1.0
    answer = environment.prompt(index).meta["answer"]
    assert len(answer) == length
    assert environment.score(index, answer) == 1.0


def test_prompts_are_the_same_in_another_process() -> None:
    environment = game("reverse", seed=7, length=5, alphabet=20)
    here = [environment.prompt(i).text for i in range(50)]
    assert len(set(here)) > 40
    assert here != [game("reverse", seed=8, length=5, alphabet=20).prompt(i).text for i in range(50)]
    script = (
        "from syncline.contract.job import TaskSpec\n"
        "from syncline.environments.environment import load\n"
        "e = load(TaskSpec(options={'game': 'reverse', 'length': 5, 'alphabet': 20}), 7)\n"
        "print('\\n'.join(e.prompt(i).text for i in range(50)))\n"
        "import sys; assert 'torch' not in sys.modules and 'redis' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == here


def test_prompts_keep_to_the_charset_of_the_tiny_tokenizers() -> None:
    for name in ("reverse", "copy", "sort", "successor", "kind"):
        environment = game(name, length=6, alphabet=36)
        assert {c for i in range(200) for c in environment.prompt(i).plain()} <= set(SYMBOLS + ":=")


def test_single_turn_is_done_after_its_turn() -> None:
    environment = game("reverse")
    assert environment.reset(3) == environment.prompt(3)
    step = environment.step(3, [Turn(text="abc")])
    assert (step.done, step.observed) == (True, ())
    with pytest.raises(ValueError, match="there are none"):
        environment.step(3, [])


def test_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match="index -1 is negative"):
        game("reverse").prompt(-1)

"""An environment of a user's own, for `environment = "python"`."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.environments.turns import Message, Prompt, Step, Turn


class Guess:
    name = "guess/1"
    size = None
    multi_turn = True

    def __init__(self, seed: int, most: int) -> None:
        self.secret, self.most = seed % 10, most

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="?")

    def reset(self, index: int) -> Prompt:
        return self.prompt(index)

    def step(self, index: int, turns: Sequence[Turn]) -> Step:
        right = turns[-1].text == str(self.secret)
        observed = () if right else (Message(role="tool", content="no"),)
        return Step(done=right or len(turns) == self.most, observed=observed)

    def score(self, index: int, text: str) -> float:
        return float(text.endswith(str(self.secret)))

    def score_turns(self, index: int, turns: Sequence[Turn]) -> float:
        return 1.0 / len(turns) if turns[-1].text == str(self.secret) else 0.0


def guess(seed: int, most: int = 3) -> Guess:
    return Guess(seed, most)


def nothing(seed: int) -> object:
    return object()

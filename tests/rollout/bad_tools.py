"""An environment whose tools misbehave as the policy's text says."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from syncline.environments.turns import Prompt, SingleTurn, Step, Turn


class Bad(SingleTurn):
    name = "bad/1"
    size = None

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="?")

    def score(self, index: int, text: str) -> float:
        return 0.0

    def step(self, index: int, turns: Sequence[Turn]) -> Step:
        match turns[-1].text:
            case "hang":
                threading.Event().wait()
            case "hoard":
                bytearray(1 << 30)
            case "raise":
                raise RuntimeError("a fault of the tool's own")
        return Step(done=True)


def made(seed: int) -> Bad:
    return Bad()

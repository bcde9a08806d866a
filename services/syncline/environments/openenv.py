"""Environments behind an OpenEnv server: `options = { url = "ws://host:port", action = "message", ... }`.

The server's WebSocket sessions are used (`/ws`), since its plain HTTP holds no episode for one caller among several. A
session is one request of ours: it is reset with the seed that the prompt's index means, the turns so far are played
again, and the last observation is the answer. So an episode outlives the process that played it, and the server must be
the same for the same seed and actions. The reward is the sum of the rewards of all turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from syncline.environments.openenv_session import Result, opened
from syncline.environments.turns import Message, Prompt, Step, Turn, require_index


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How texts become actions, and observations texts.

    action, observation  the field that a turn's text goes into, and the one that is shown; "": all of it, as JSON
    size                 distinct seeds, after which they begin anew; 0: endless
    version, timeout     recorded with each reward; seconds for one answer
    """

    url: Annotated[str, msgspec.Meta(pattern=r"^wss?://[^\s/]+(/\S*)?$", max_length=500)]
    action: Annotated[str, msgspec.Meta(max_length=100)] = "message"
    observation: Annotated[str, msgspec.Meta(max_length=100)] = ""
    size: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)] = 0
    version: Annotated[str, msgspec.Meta(max_length=100)] = "unknown"
    timeout: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 5.0


class OpenEnv:
    """See the module. First observations are remembered: the members of a group ask for the same one."""

    multi_turn = True

    def __init__(self, options: Options, seed: int) -> None:
        self._url, self.options, self._seed = f"{options.url.rstrip('/')}/ws", options, seed
        self._session = opened(self._url, options.timeout)
        self.size = options.size or None
        self.name = f"openenv {self._url} {options.version}"
        self._first = lru_cache(maxsize=1024)(lambda item: self._played(item, ())[-1])

    def prompt(self, index: int) -> Prompt:
        """The first observation. Raises `ValueError` if the server gives none."""
        try:
            text = self._shown(self._first(self._item(index)))
        except OSError as error:
            raise ValueError(f"prompt {index}: {self._url}: {error}") from error
        return Prompt(index=index, text=text, messages=(Message(role="user", content=text),))

    def reset(self, index: int) -> Prompt:
        """The prompt itself."""
        return self.prompt(index)

    def step(self, index: int, turns: Sequence[Turn]) -> Step:
        """The observation after the latest turn. Raises `OSError` for trouble of the moment."""
        last = self._played(self._item(index), turns)[-1]
        shown = () if last.done else (Message(role="user", content=self._shown(last)),)
        return Step(done=last.done, observed=shown)

    def score(self, index: int, text: str) -> float | None:
        """Of an episode of one turn."""
        return self.score_turns(index, [Turn(text=text)])

    def score_turns(self, index: int, turns: Sequence[Turn]) -> float | None:
        """The sum of the rewards; None if the server gave none."""
        played = self._played(self._item(index), turns)[1:]
        rewards = [result.reward for result in played if result.reward is not None]
        return sum(rewards) if rewards else None

    def _item(self, index: int) -> int:
        return require_index(index) % self.size if self.size else require_index(index)

    def _played(self, item: int, turns: Sequence[Turn]) -> list[Result]:
        """What a new session answers to the reset and to each turn."""
        actions = [self._action(turn.text) for turn in turns]
        return self._session(actions, (self._seed * 1_000_003 + item) % 2**31)

    def _action(self, text: str) -> object:
        if self.options.action:
            return {self.options.action: text}
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError:
            return {}  # no action of the policy's: what it is worth is the server's to say

    def _shown(self, result: Result) -> str:
        field, found = self.options.observation, result.observation
        if field and field not in found:
            raise ValueError(f"{self._url}: an observation has no {field!r}, but {sorted(found)}")
        return str(found[field]) if field else msgspec.json.encode(found).decode()

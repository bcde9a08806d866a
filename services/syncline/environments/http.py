"""An environment behind a server of the user's own: `options = { url = "http://host:port", ... }`.

Each request is a POST of JSON to a path under `url`, and names the job's `seed` and the prompt's `index`:

    /prompt  {seed, index}         -> {"text": ..., "messages": [...], "meta": {...}}, at least one of the first two
    /step    {seed, index, turns}  -> {"done": false, "observed": [{"role": "tool", "content": ...}]}; multi_turn alone
    /score   {seed, index, turns}  -> {"reward": 0.5}; null: cannot tell

The server keeps nothing between requests: each holds the whole episode, and the same one may come twice. A server that
is down, or answers 408, 425, 429 or 5xx, is trouble of the moment; other answers are faults of the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec

from syncline.environments.http_post import client, post
from syncline.environments.turns import Message, Prompt, Step, Turn, require_index

S = TypeVar("S")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`version` is recorded with each reward; `size` distinct items, 0: endless; `timeout` of a request in seconds."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=500)]
    version: Annotated[str, msgspec.Meta(max_length=100)] = "unknown"
    size: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)] = 0
    multi_turn: bool = False
    timeout: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 5.0


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    text: str | None = None
    messages: tuple[Message, ...] = ()
    meta: dict[str, Any] = {}


class _Scored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    reward: float | None


class Http:
    """See the module. Prompts are remembered: the members of a group ask for the same one."""

    def __init__(self, options: Options, seed: int) -> None:
        self._url, self._seed = options.url.rstrip("/"), seed
        self.name = f"http {self._url} {options.version}"
        self.size = options.size or None
        self.multi_turn = options.multi_turn
        self._client = client(options.timeout)
        self._prompt = lru_cache(maxsize=1024)(self._asked)

    def prompt(self, index: int) -> Prompt:
        """The server's. Raises `ValueError` if it gives none."""
        try:
            return self._prompt(require_index(index))
        except ConnectionError as error:
            raise ValueError(f"prompt {index}: {error}") from error

    def reset(self, index: int) -> Prompt:
        """The prompt itself."""
        return self.prompt(index)

    def step(self, index: int, turns: Sequence[Turn]) -> Step:
        """The server's. Raises `ConnectionError` for trouble of the moment."""
        return self._post("step", Step, index, turns=turns) if self.multi_turn else Step(done=True)

    def score(self, index: int, text: str) -> float | None:
        """Of an episode of one turn."""
        return self.score_turns(index, [Turn(text=text)])

    def score_turns(self, index: int, turns: Sequence[Turn]) -> float | None:
        """The server's. Raises `ConnectionError` for trouble of the moment."""
        return self._post("score", _Scored, index, turns=turns).reward

    def _asked(self, index: int) -> Prompt:
        told = self._post("prompt", _Asked, index)
        if told.text is None and not told.messages:
            raise ValueError(f"{self._url}/prompt: index {index} has neither text nor messages")
        return Prompt(index=index, text=told.text, messages=told.messages, meta=told.meta)

    def _post(self, path: str, shape: type[S], index: int, **more: Any) -> S:
        return post(self._client, f"{self._url}/{path}", {"seed": self._seed, "index": index, **more}, shape)

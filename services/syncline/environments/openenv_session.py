"""A session with an OpenEnv server from its reset to its end, in the protocol of the library's own client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec


class Result(msgspec.Struct, frozen=True):
    """What the server answers to a reset and to a step. `reward` None: it gave none."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class _Answer(msgspec.Struct, frozen=True):
    type: Literal["observation", "error"]
    data: dict[str, Any]


def opened(url: str, timeout: float) -> Callable[[Sequence[object], int], list[Result]]:
    """A function that plays actions after a reset with a seed, each time in a session of its own.

    timeout  seconds for one answer

    The function raises `OSError` for trouble of the moment, `ValueError` for an answer that is an error or is none.
    Raises `ValueError` if the extra is not installed.
    """
    try:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect
    except ImportError:
        raise ValueError("task.environment: openenv needs the extra: pip install syncline[openenv]") from None

    def played(actions: Sequence[object], seed: int) -> list[Result]:
        asked = [("reset", {"seed": seed}), *(("step", action) for action in actions)]
        found = []
        try:
            with connect(url, open_timeout=timeout, close_timeout=timeout, proxy=None) as session:
                for kind, data in asked:
                    session.send(msgspec.json.encode({"type": kind, "data": data}), text=True)
                    found.append(_result(url, session.recv(timeout=timeout)))
        except WebSocketException as error:
            raise ConnectionError(f"{url}: {type(error).__name__}: {error}") from error
        return found

    return played


def _result(url: str, raw: str | bytes) -> Result:
    try:
        answer = msgspec.json.decode(raw, type=_Answer)
        if answer.type == "observation":
            return msgspec.convert(answer.data, Result)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{url}: {error}") from None
    told = f"{url}: {answer.data.get('code')}: {answer.data.get('message')}"
    if answer.data.get("code") == "CAPACITY_REACHED":
        raise ConnectionError(told)
    raise ValueError(told)

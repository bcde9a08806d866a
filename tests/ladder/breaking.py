"""How a defect is made: a piece of the system replaced from outside, for as long as a context is open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from syncline.contract.job import JobSpec
from syncline.lab.ladder.records import Level

Broken = Callable[[], AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Defect:
    """`broken`: the context in which the system has it. `asked`: the spec with it, for those of a contract."""

    name: str
    level: Level
    recipe: str
    model: str
    broken: Broken = nullcontext
    asked: Callable[[JobSpec], JobSpec] = lambda spec: spec


def around(owner: Any, name: str, change: Callable[..., Any]) -> Broken:
    """`owner.name` replaced by `change(original, *args)`."""

    @contextmanager
    def broken() -> Iterator[None]:
        original = getattr(owner, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            return change(original, *args, **kwargs)

        with patch.object(owner, name, changed):
            yield

    return broken


def result(owner: Any, name: str, after: Callable[[Any], Any]) -> Broken:
    """What `owner.name` returns, changed."""
    return around(owner, name, lambda original, *args, **kwargs: after(original(*args, **kwargs)))

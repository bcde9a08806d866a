"""An environment that a user's function makes: `options = { function = "module:function", ... }`.

The function gets the job's data seed and the other options by name, and returns an object with the methods of
`environment.Environment`. It must make the same environment in every process.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from syncline.contract.job import Problem
from syncline.environments import options as reading


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ours; the other options are the function's."""

    function: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


_NEEDED = ("name", "size", "multi_turn", "prompt", "reset", "step", "score", "score_turns")


def check(given: Mapping[str, Any]) -> list[Problem]:
    """The function's name; its own options are its own, at load."""
    return reading.check(Options, {key: value for key, value in given.items() if key == "function"})


def made(given: Mapping[str, Any], seed: int) -> Any:
    """The environment. Raises `ValueError` naming the module, the function, or what its answer lacks."""
    ours = reading.read(Options, {"function": given["function"]})
    module, _, name = ours.function.partition(":")
    place = f"{reading.PATH}.function: {ours.function}"
    try:
        function: object = vars(importlib.import_module(module)).get(name)
    except ImportError as error:
        raise ValueError(f"{place}: {error}") from error
    if not callable(function):
        raise ValueError(f"{place}: there is no such function")
    found = function(seed, **{key: value for key, value in given.items() if key != "function"})
    lacking = [part for part in _NEEDED if not hasattr(found, part)]
    if lacking:
        raise ValueError(f"{place}: what it returned has no {', '.join(lacking)}")
    return found

"""Reading an adapter's options against its declared struct, one problem per wrong option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from syncline.contract.job import Problem

S = TypeVar("S", bound=msgspec.Struct)

PATH = "task.options"


def unknown(key: str, known: list[str]) -> Problem:
    """The problem of an option that does not exist, with the nearest one that does."""
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(sorted(known))}"
    return Problem(path=f"{PATH}.{key}", message="there is no such option", hint=hint)


def check(
    shape: type[S], options: Mapping[str, Any], problems: Callable[[S], list[Problem]] | None = None
) -> list[Problem]:
    """Every unknown, ill-typed, out-of-range or missing option; if there is none, `problems` on the whole."""
    fields = {field.name: field for field in msgspec.structs.fields(shape)}
    found = [unknown(key, list(fields)) for key in options if key not in fields]
    for name, field in fields.items():
        if name not in options:
            if field.required:
                found.append(Problem(path=f"{PATH}.{name}", message="is missing", hint="it has no default"))
            continue
        try:
            msgspec.convert(options[name], field.type, strict=True)
        except msgspec.ValidationError as error:
            found.append(
                Problem(path=f"{PATH}.{name}", message=str(error), hint=_choices(field.type, options[name]))
            )
    if found or problems is None:
        return found
    return problems(read(shape, options))


def _choices(wanted: Any, given: object) -> str:
    if get_origin(wanted) is not Literal:
        return ""
    choices = [str(choice) for choice in get_args(wanted)]
    near = get_close_matches(str(given), choices, n=1)
    return f"did you mean {near[0]!r}?" if near else f"one of {', '.join(choices)}"


def read(shape: type[S], options: Mapping[str, Any]) -> S:
    """The options as their struct. Raises `ValueError`; callers run `check` first for a full list."""
    try:
        return msgspec.convert(dict(options), shape, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"{PATH}: {error}") from None

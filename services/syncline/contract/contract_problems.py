"""msgspec's findings about a contract, in a user's words: key, what is wrong, what would be right."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from syncline.contract.precision import PrecisionContract

_PLACE = re.compile(r"^(?P<says>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object contains unknown field `(?P<field>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`$")
_TYPES = re.compile(r"^Expected `(?P<wanted>[^`]*)`, got `(?P<found>[^`]*)`$")
_CHOICE = re.compile(r"^Invalid enum value (?P<value>.*)$", re.DOTALL)
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table of keys",
    "null": "null",
}


def explained(message: str) -> tuple[str, str]:
    """Path below the contract (`.families.0.match`, or empty) and the finding, of a message of msgspec."""
    place = _PLACE.fullmatch(message)
    assert place is not None
    says, path = place["says"], (place["path"] or "").replace("[", ".").replace("]", "")
    if unknown := _NAMED.fullmatch(says):
        return f"{path}.{unknown['field']}", _unknown(unknown["field"], _at(path))
    if missing := _MISSING.fullmatch(says):
        return f"{path}.{missing['field']}", "is missing"
    if kinds := _TYPES.fullmatch(says):
        wanted = " or ".join(_WORDS.get(kind, kind) for kind in kinds["wanted"].split(" | "))
        return path, f"should be {wanted}, not {_WORDS.get(kinds['found'], kinds['found'])}"
    if chosen := _CHOICE.fullmatch(says):
        choices = ", ".join(repr(choice) for choice in _choices(_at(path)))
        return path, f"is {chosen['value']}; one of {choices}"
    return path, says


def _unknown(field: str, at: Any) -> str:
    known = [name for part in _structs(at) for name in part.__struct_fields__]
    near = difflib.get_close_matches(field, known, n=1)
    return "is an unknown key; " + (
        f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
    )


# ---- the contract's own tree --------------------------------------------------------------------------------
def _at(path: str) -> Any:
    """Annotation of what lies at `path`, from the contract down."""
    here: Any = PrecisionContract
    for part in filter(None, path.split(".")):
        if part.isdecimal() or part == "...":
            here = next(
                (arm for kind in _arms(here) for arm in typing.get_args(kind) if arm is not ...), here
            )
        else:
            here = next(typing.get_type_hints(kind)[part] for kind in _structs(here))
    return here


def _arms(annotation: Any) -> Sequence[Any]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _structs(annotation: Any) -> list[type[msgspec.Struct]]:
    return [arm for arm in _arms(annotation) if isinstance(arm, type) and issubclass(arm, msgspec.Struct)]


def _choices(annotation: Any) -> list[Any]:
    return [
        value
        for arm in _arms(annotation)
        if typing.get_origin(arm) is Literal
        for value in typing.get_args(arm)
    ]

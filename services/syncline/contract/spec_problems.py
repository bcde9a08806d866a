"""pydantic's findings about a job spec, in a user's words: path, what is wrong, what would be right."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from syncline.contract.job import JobSpec, Problem

MOST = 50
_SHOWN = 60  # characters of a wrong value that a message repeats

_WORDS = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table of keys",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
}


def explain(errors: Sequence[Mapping[str, Any]], loaded: Mapping[str, Any]) -> list[Problem]:
    """One problem per place. A value that fits no branch of a union is one problem that lists them all.

    At most `MOST` problems; a last one says how many more there are.
    """
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        found.setdefault(_place(error, loaded), []).append(error)
    around = {place[:end] for place in found for end in range(len(place))}
    places = [place for place in found if place not in around]  # of nested places the innermost tells most
    listed = [_problem(place, found[place], loaded) for place in places[:MOST]]
    if len(places) > MOST:
        listed.append(Problem(path="", message=f"and {len(places) - MOST} more problems"))
    return listed


def _place(error: Mapping[str, Any], loaded: Any) -> tuple[str, ...]:
    """pydantic's location without the names of union branches, which lead nowhere in the user's text."""
    value, place = loaded, []
    for part in error["loc"]:
        inside_table = isinstance(value, dict) and part in value
        inside_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if inside_table or inside_list:
            value = value[part]
        elif error["type"] == "missing" and part == error["loc"][-1]:
            value = None
        else:
            continue
        place.append(str(part))
    return tuple(place)


def _problem(place: tuple[str, ...], errors: list[Mapping[str, Any]], loaded: Mapping[str, Any]) -> Problem:
    first = errors[0]
    path = shown_path(place)
    if first["type"] == "extra_forbidden":
        return _unknown(place)
    if first["type"] == "missing":
        return Problem(path=path, message="is missing", hint=_description(place))
    if first["type"] == "json_invalid":
        return Problem(path="", message=f"cannot be read: {first['ctx']['error']}")
    wanted = " or ".join(dict.fromkeys(filter(None, map(_wanted, errors))))
    value = _value(place, loaded)
    if not wanted:
        return Problem(
            path=path, message=first["msg"][:1].lower() + first["msg"][1:], hint=_description(place)
        )
    shown = "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "..."
    return Problem(path=path, message=f"should be {wanted}, not {shown}", hint=_nearest_choice(first, value))


def shown_path(place: Sequence[str]) -> str:
    """Dotted path for people; a key too long to be meant is cut."""
    return ".".join(part if len(part) <= _SHOWN else part[:_SHOWN] + "..." for part in place)


def _wanted(error: Mapping[str, Any]) -> str:
    """What the value should be, or "" where pydantic's own sentence says it in another form."""
    if error["type"] == "string_pattern_mismatch":
        return f"a string of the form {error['ctx']['pattern']}"
    words = _WORDS.get(error["type"])
    message: str = error["msg"]
    if words is None and message.startswith("Input should be "):
        words = message.removeprefix("Input should be ")
    return words or ""


def _value(place: tuple[str, ...], loaded: Any) -> Any:
    for part in place:
        loaded = loaded[int(part)] if isinstance(loaded, list) else loaded[part]
    return loaded


def _nearest_choice(error: Mapping[str, Any], value: Any) -> str:
    if error["type"] != "literal_error" or not isinstance(value, str):
        return ""
    choices = [part.strip("' ") for part in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
    near = difflib.get_close_matches(value, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


# ---- the spec's own tree ----------------------------------------------------------------------------------
def _unknown(place: tuple[str, ...]) -> Problem:
    *parent, name = place
    path = shown_path(place)
    model = _model_at(parent)
    here = list(model.model_fields) if model else []
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.6) if len(name) <= _SHOWN else []
    elsewhere = [p for p in _all_places(JobSpec, ()) if p[-1] == name and list(p[:-1]) != parent]
    if near:
        hint = f"did you mean {shown_path([*parent, near[0]])}?"
        return Problem(path=path, message="is an unknown key", hint=hint)
    if elsewhere:
        hint = f"did you mean {' or '.join(map(shown_path, elsewhere))}?"
        return Problem(path=path, message="is an unknown key here", hint=hint)
    return Problem(path=path, message="is an unknown key", hint=f"known keys here: {', '.join(here)}")


def _description(place: tuple[str, ...]) -> str:
    model = _model_at(place[:-1])
    if model is None or place[-1] not in model.model_fields:
        return ""
    field = model.model_fields[place[-1]]
    inner = _model_of(field.annotation)
    return f"a table with {', '.join(inner.model_fields)}" if inner else field.description or ""


def _model_at(place: Sequence[str]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = JobSpec
    for part in place:
        if model is None:
            return None
        if part.isdecimal():
            continue  # an entry of a list of tables: same model
        field = model.model_fields.get(part)
        model = _model_of(field.annotation) if field else None
    return model


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `SwitchPlan`, `tuple[SwitchPlan, ...]` or `KLSpec | None`."""
    inside = typing.get_args(annotation)  # a parametrised generic passes for a class in Python 3.11
    if inside or not isinstance(annotation, type):
        return next((m for m in map(_model_of, inside) if m), None)
    return annotation if issubclass(annotation, BaseModel) else None


def _all_places(model: type[BaseModel], above: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        found.append((*above, name))
        inner = _model_of(field.annotation)
        if inner is not None:
            found += _all_places(inner, (*above, name))
    return found

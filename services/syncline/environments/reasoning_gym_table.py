"""Names of the `reasoning-gym` data sets and their options, known without the library's import.

`reasoning_gym_options.json` beside this file holds them, so that a wrong name is found at submit in a
millisecond (the import takes a second). `python -m syncline.environments.reasoning_gym_table` rewrites the
file for the installed library, and a test holds the two together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from syncline.contract.job import Problem
from syncline.environments import options as reading

TABLE = Path(__file__).with_name("reasoning_gym_options.json")
TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "list[int]": list[int],
    "list[float]": list[float],
    "list[str]": list[str],
}


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Data set -> option -> type name, a key of `TYPES`. Options of other types cannot be given in a spec."""
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, dict[str, str]])


def check(dataset: str, given: Mapping[str, Any], others: list[str]) -> list[Problem]:
    """Problems of a data set's name and of its options; `others`: our own option names, for hints."""
    if dataset not in table():
        near = get_close_matches(dataset, table(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"names are in {TABLE.name}"
        message = f"reasoning-gym has no data set {dataset!r}"
        return [Problem(path=f"{reading.PATH}.dataset", message=message, hint=hint)]
    known = table()[dataset]
    found: list[Problem] = []
    for key, value in given.items():
        if key not in known:
            found.append(reading.unknown(key, [*known, *others]))
            continue
        try:
            msgspec.convert(value, TYPES[known[key]], strict=True)
        except msgspec.ValidationError as error:
            found.append(Problem(path=f"{reading.PATH}.{key}", message=str(error)))
    return found


def installed() -> dict[str, dict[str, str]]:
    """`table()` as the installed library would have it."""
    from reasoning_gym.factory import DATASETS

    found: dict[str, dict[str, str]] = {}
    for name, (_, config) in sorted(DATASETS.items()):
        found[name] = {}
        for field in dataclasses.fields(config):
            kind = field.type.__name__ if field.type in (str, int, float, bool) else _plain(str(field.type))
            if kind in TYPES and field.name not in ("seed", "size"):
                found[name][field.name] = kind
    return found


def _plain(annotation: str) -> str:
    inner = annotation.removeprefix("typing.")
    return inner.removeprefix("Optional[").removesuffix("]") if inner.startswith("Optional[") else inner


if __name__ == "__main__":
    TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(installed()), indent=1) + b"\n")

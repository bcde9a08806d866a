"""The shipped precision contracts, one TOML file each, and their reader.

May live here: recipes as data. May not live here: code that a recipe needs, or a recipe that no test runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec

from syncline.contract.contract_problems import explained
from syncline.contract.precision import PrecisionContract
from syncline.contract.schemes import SCHEMES


class BadContract(ValueError):
    """A contract that cannot be read. `key` is the path of what is wrong, such as `precision.custom.adapter.rank`."""

    def __init__(self, key: str, message: str) -> None:
        self.key, self.message = key, message
        super().__init__(f"{key}: {message}")


def parse(text: str, where: str) -> PrecisionContract:
    """The contract in TOML `text`; see `read`. Raises `ValueError` naming `where` and the key."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: {error}") from None
    return read(data, where)


def read(data: Mapping[str, Any], where: str) -> PrecisionContract:
    """The contract in `data`. Schemes may be given by name (`SCHEMES`) or as a table.

    Raises `BadContract` whose key begins with `where`.
    """
    made = dict(data)
    families = made.get("families")
    if isinstance(families, list):
        made["families"] = [
            _with_schemes(family, f"{where}.families.{i}") for i, family in enumerate(families)
        ]
    try:
        return msgspec.convert(made, PrecisionContract)
    except msgspec.ValidationError as error:
        path, says = explained(str(error))
        raise BadContract(f"{where}{path}", says) from None


def _with_schemes(family: Any, where: str) -> Any:
    if not isinstance(family, dict):
        return family
    made = dict(family)
    for key in ("weight", "activation"):
        name = made.get(key)
        if not isinstance(name, str | dict | None):
            raise BadContract(f"{where}.{key}", f"should be the name of a scheme, or its table, not {name!r}")
        if isinstance(name, str):
            if name not in SCHEMES:
                known = ", ".join(sorted(SCHEMES))
                raise BadContract(f"{where}.{key}", f"there is no scheme {name!r}; one of {known}")
            made[key] = msgspec.to_builtins(SCHEMES[name])
    return made


def _read() -> dict[str, PrecisionContract]:
    found = {}
    for file in sorted(files(__name__).iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            contract = parse(file.read_text(encoding="utf-8"), file.name)
            if contract.name != file.name.removesuffix(".toml"):
                raise ValueError(f"{file.name}: name is {contract.name!r}, the file says otherwise")
            found[contract.name] = contract
    return found


RECIPES: dict[str, PrecisionContract] = _read()
"""Shipped recipes by name."""

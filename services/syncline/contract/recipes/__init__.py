"""The shipped precision contracts, one TOML file each, and their reader.

May live here: recipes as data. May not live here: code that a recipe needs, or a recipe that no test runs.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

import msgspec

from syncline.contract.precision import PrecisionContract
from syncline.contract.schemes import SCHEMES


def parse(text: str, where: str) -> PrecisionContract:
    """The contract in TOML `text`. Schemes may be given by name (`SCHEMES`) or as a table.

    Raises `ValueError` naming `where` and the key.
    """
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: {error}") from None
    for i, family in enumerate(data.get("families", ())):
        for key in ("weight", "activation"):
            name = family.get(key) if isinstance(family, dict) else None
            if isinstance(name, str):
                if name not in SCHEMES:
                    known = ", ".join(sorted(SCHEMES))
                    raise ValueError(
                        f"{where}: families.{i}.{key}: there is no scheme {name!r}; one of {known}"
                    )
                family[key] = msgspec.to_builtins(SCHEMES[name])
    try:
        return msgspec.convert(data, PrecisionContract)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from None


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

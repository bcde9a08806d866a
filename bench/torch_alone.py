"""Import this first, and `syncline.numerics` can be imported where nothing but torch is installed.

The quantizers need the schemes of `contract/schemes.py`, which are msgspec structs: without msgspec, dataclasses do.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from importlib.util import find_spec
from pathlib import Path


class Struct:
    """As much of msgspec's as schemes ask for."""

    def __init_subclass__(cls, **options: bool) -> None:
        dataclasses.dataclass(frozen=options.get("frozen", False), kw_only=options.get("kw_only", False))(cls)


if find_spec("msgspec") is None:
    sys.modules["msgspec"] = types.ModuleType("msgspec")
    vars(sys.modules["msgspec"])["Struct"] = Struct
if find_spec("syncline") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "services"))

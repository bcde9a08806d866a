"""How many items a data set has, and how difficult each is, without loading its environment.

For whoever draws prompts: it never makes one. `contract.prompts_spec.COUNTED` names what can be counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from syncline.environments import jsonl, reasoning_gym
from syncline.environments import options as reading


def count(environment: str, options: Mapping[str, Any], data: Path | None = None) -> int | None:
    """Distinct items, after which indices begin anew; None: endless, or known only where it is loaded.

    data   root of data files, as in `environment.load`

    Raises `ValueError` naming the option, or the file, that is wrong.
    """
    match environment:
        case "jsonl":
            return len(jsonl.JsonLines(reading.read(jsonl.Options, options), data).items)
        case "reasoning_gym":
            ours, _ = reasoning_gym.split(options)
            return reading.read(reasoning_gym.Options, ours).size
    return None


def difficulties(options: Mapping[str, Any], key: str, data: Path | None = None) -> list[float]:
    """The number that each item of a jsonl file has under `key`. Raises `ValueError` naming the first without."""
    items = jsonl.JsonLines(reading.read(jsonl.Options, options), data).items
    found = [extra.get(key) for _, extra in items]
    for number, value in enumerate(found, start=1):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"prompts.difficulty: line {number} of {options['file']} has no number under {key!r}"
            )
    return msgspec.convert(found, list[float])

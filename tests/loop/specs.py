"""Small jobs that the loop tests submit."""

from __future__ import annotations

import copy
from typing import Any

BASE: dict[str, Any] = {
    "name": "loop",
    "model": {"name": "tiny-dense"},
    "task": {"environment": "characters", "options": {"game": "reverse", "length": 3, "alphabet": 8}},
    "sampling": {"max_tokens": 6},
    "batch": {"groups": 4, "group_size": 4},
    "optimizer": {"lr": 3e-3},
    "schedule": {"mode": "colocated", "updates": 12, "max_lag": 1},
    "rollout": {"workers": 2},
    "checkpoint": {"every": 4},
}


def spec(**changes: Any) -> dict[str, Any]:
    """`BASE` with nested changes: `spec(schedule={"updates": 5})` keeps the other keys of `schedule`."""
    out = copy.deepcopy(BASE)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] |= value
        else:
            out[key] = value
    return out

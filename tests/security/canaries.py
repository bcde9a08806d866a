"""A reward function that the secrets test imports: it says which of its process's variables hold a canary."""

from __future__ import annotations

import os


def looks(prompt: str, response: str, meta: dict[str, object]) -> float:
    """0.5, and an error that would carry a secret into a log, were there one to be had."""
    found = [value for value in os.environ.values() if "canary" in value]
    if found:
        raise ValueError(found[0])
    return 0.5

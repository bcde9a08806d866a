"""Reward functions that a job may name, good and bad. The errands service under test imports them by name."""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request


def length(prompt: str, response: str, meta: dict[str, object]) -> float:
    """A plain reward; shows that prompt, response and meta arrive."""
    assert prompt.startswith("reverse:")
    assert meta["answer"]
    return len(response) / 10


def tells_by_text(prompt: str, response: str, meta: dict[str, object]) -> object:
    """What goes wrong is chosen by the response."""
    match response:
        case "none":
            return None
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "text":
            return "good"
        case "bool":
            return True
        case "raise":
            raise KeyError("no such answer")
        case "hang":
            while True:
                time.sleep(0.01)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "memory":
            return float(len(bytearray(1 << 31)))
        case "secret":
            return 1.0 if "SYNCLINE_REDIS_URL" in os.environ else 0.25
    return 0.5


def second_time(prompt: str, response: str, meta: dict[str, object]) -> float:
    """Asks the server that `response` names; one that refuses is an `OSError`, which may pass."""
    with urllib.request.urlopen(response, timeout=5) as answer:
        return float(answer.read())


def looks_around(prompt: str, response: str, meta: dict[str, object]) -> float:
    """How many libraries of the service are in this process."""
    return float(len({"celery", "kombu", "redis", "opentelemetry", "httpx"} & sys.modules.keys()))


def waits_if_told(prompt: str, response: str, meta: dict[str, object]) -> float:
    """If the response says so."""
    if response == "wait":
        time.sleep(60)
    return 0.5


def slow(prompt: str, response: str, meta: dict[str, object]) -> float:
    """Long enough for a server to be restarted meanwhile."""
    time.sleep(0.1)
    return 0.5

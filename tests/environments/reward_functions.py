"""Reward functions that a job may name, good and bad. The errands service under test imports them by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


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
    """The network is down the first time. `response` names the file that remembers."""
    mark = Path(response)
    if not mark.exists():
        mark.touch()
        raise ConnectionError("judge unreachable")
    return 1.0


def looks_around(prompt: str, response: str, meta: dict[str, object]) -> float:
    """How many libraries of the service are in this process."""
    return float(len({"celery", "kombu", "redis", "opentelemetry", "httpx"} & sys.modules.keys()))


def kills_its_scorer(prompt: str, response: str, meta: dict[str, object]) -> float:
    """If the response says so."""
    if response == "kill":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return 0.5


def slow(prompt: str, response: str, meta: dict[str, object]) -> float:
    """Long enough for a server to be restarted meanwhile."""
    time.sleep(0.1)
    return 0.5

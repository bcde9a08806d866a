"""The whole system as a user starts it, on a run root of its own, asked over REST."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cpu
import httpx
from cpu import Reading
from rows import MODELS, ROOT, note

SYNCLINE = Path(sys.executable).with_name("syncline")
TERMINAL = {"succeeded", "failed", "cancelled"}
_EVERY = 0.25  # seconds between looks at a job: each look costs the machine that is being measured


class Stack:
    """A running installation."""

    def __init__(self, runs: Path, extra: Mapping[str, str] | None = None) -> None:
        self.runs = runs
        self._env = {key: value for key, value in os.environ.items() if not key.startswith("SYNCLINE_")}
        self._env |= {"SYNCLINE_RUNS": str(runs), "SYNCLINE_MODELS": str(MODELS)}
        self._env |= {"SYNCLINE_PORT": "0", "OMP_NUM_THREADS": "1"} | dict(extra or {})
        self._http = httpx.Client(timeout=60)

    def up(self) -> None:
        self._command("up")
        self._http.base_url = httpx.URL(json.loads((self.runs / "up.json").read_text())["url"])

    def down(self) -> None:
        self._command("down")
        self._http.close()

    def get(self, path: str) -> Any:
        response = self._http.get(path)
        response.raise_for_status()
        return response.json()

    def pages(self, path: str) -> list[dict[str, Any]]:
        """All items of a paged listing."""
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            page = self.get(f"{path}?limit=500{after}")
            found += page["items"]
            if page["next"] is None:
                return found
            after = f"&after={page['next']}"

    def events(self, job: str) -> list[tuple[float, dict[str, Any]]]:
        """Every event of an ended job with the wall-clock second at which Redis took it."""
        found = []
        with self._http.stream("GET", f"/v1/jobs/{job}/events") as response:
            response.raise_for_status()
            name, cursor = "", ""
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                match field:
                    case "event":
                        name = value
                    case "id":
                        cursor = value
                    case "data" if name == "event":
                        milliseconds = cursor.split("_")[0].partition("-")[0]
                        found.append((int(milliseconds) / 1000, json.loads(value)))
                    case "data" if name == "end":
                        return found
        raise RuntimeError(f"the events of {job} stopped without an end")

    def run(self, spec: Mapping[str, Any], seconds: float) -> tuple[str, list[Reading]]:
        """Submit a job and wait for its end; returns its id, and CPU seconds each time it had made an update.

        Raises `RuntimeError` unless it succeeds.
        """
        response = self._http.post("/v1/jobs", json=spec)
        if response.status_code != 201:
            raise RuntimeError(f"submit: {response.text}")
        job = str(response.json()["id"])
        end, told = time.monotonic() + seconds, -1
        readings: list[Reading] = []
        while time.monotonic() < end:
            status = self.get(f"/v1/jobs/{job}")
            if status["update"] // 5 > told:
                told = status["update"] // 5
                note(f"{spec['name']}: update {status['update']} of {status['updates']}")
            if status["update"] > (readings[-1].update if readings else 0) and status["state"] == "running":
                readings.append(Reading(status["update"], cpu.read(self.runs)))
            if status["state"] in TERMINAL:
                if status["state"] != "succeeded":
                    raise RuntimeError(f"{spec['name']}: {status['state']}: {status['reason']}")
                return job, readings
            time.sleep(_EVERY)
        raise RuntimeError(f"{spec['name']}: not over within {seconds:g} s")

    def _command(self, word: str) -> None:
        done = subprocess.run(
            [str(SYNCLINE), word],
            cwd=ROOT,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"syncline {word}: {done.stdout}{done.stderr}")


@contextmanager
def stack(extra: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """A stack that ends, and leaves nothing behind. `extra`: variables that its processes get too."""
    with tempfile.TemporaryDirectory(prefix="sl-bench-", ignore_cleanup_errors=True) as folder:
        started = Stack(Path(folder), extra)
        try:
            started.up()
            yield started
        finally:
            started.down()

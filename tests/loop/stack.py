"""`Stack`: the whole system as a user starts it, on a run root of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SYNCLINE = Path(sys.executable).with_name("syncline")
TERMINAL = {"succeeded", "failed", "cancelled"}


class Stack:
    """Starts with `syncline up`, speaks REST, ends with `syncline down`."""

    def __init__(self, runs: Path, env: Mapping[str, str] | None = None) -> None:
        self.runs = runs
        self.env = {
            **os.environ,
            "SYNCLINE_RUNS": str(runs),
            "SYNCLINE_MODELS": str(ROOT / "examples" / "models"),
        }
        self.env |= {"OMP_NUM_THREADS": "1", "SYNCLINE_PORT": "0"} | dict(env or {})
        self.env.pop("SYNCLINE_STRICT", None)
        self.http = httpx.Client(timeout=30)

    def cli(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SYNCLINE), *words], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout
        )

    def up(self) -> Stack:
        done = self.cli("up")
        assert done.returncode == 0, done.stdout + done.stderr
        return self

    def down(self) -> None:
        done = self.cli("down")
        assert done.returncode == 0, done.stdout + done.stderr
        self.http.close()

    @property
    def url(self) -> str:
        return str(json.loads((self.runs / "up.json").read_text())["url"])

    @property
    def redis_url(self) -> str:
        return str(json.loads((self.runs / "up.json").read_text())["redis_url"])

    def get(self, path: str) -> Any:
        """GET that survives a gateway being restarted; any HTTP error fails the test."""

        def ask() -> httpx.Response | None:
            try:
                return self.http.get(self.url + path)
            except (httpx.TransportError, OSError, ValueError):
                return None

        response = wait_until(ask, 60, f"GET {path}")
        assert response.status_code < 400, response.text
        return response.json()

    def submit(self, spec: Mapping[str, Any]) -> str:
        response = self.http.post(self.url + "/v1/jobs", json=spec)
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def status(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/v1/jobs/{job}")
        return found

    def wait(self, job: str, seconds: float) -> dict[str, Any]:
        """Status of the ended job."""

        def ended() -> dict[str, Any] | None:
            status = self.status(job)
            return status if status["state"] in TERMINAL else None

        return wait_until(ended, seconds, f"end of job {job}", every=0.3)

    def wait_update(self, job: str, update: int, seconds: float) -> None:
        """Until the job has made `update` updates; fails at once if it ends otherwise."""

        def there() -> bool:
            status = self.status(job)
            assert status["state"] not in TERMINAL - {"succeeded"}, status
            return int(status["update"]) >= update

        wait_until(there, seconds, f"update {update} of {job}", every=0.1)

    def pid(self, name: str) -> int | None:
        """Pid of the live process `name` ("gateway", "redis", "trainer", "w0", ...), as its launcher knows it."""
        for state in ("stack.json", "jobs.json"):
            path = self.runs / "launch" / state
            records = json.loads(path.read_text())["processes"] if path.exists() else {}
            for full, known in records.items():
                alive = not known["dead"] and known["pid"] and psutil.pid_exists(known["pid"])
                if full.rpartition("/")[2] == name and alive:
                    return int(known["pid"])
        return None

    def kill(self, name: str) -> int:
        """`kill -9` the process `name`; returns its pid."""
        pid = wait_until(lambda: self.pid(name), 60, f"a process {name}")
        os.kill(pid, signal.SIGKILL)
        return pid

    def summary(self, job: str) -> dict[str, Any]:
        path = self.runs / job / "summary.json"
        wait_until(path.exists, 60, f"summary.json of {job}")
        loaded: dict[str, Any] = json.loads(path.read_text())
        return loaded

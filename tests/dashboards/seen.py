"""`Seen`: a real short job under a real stack, scraped by a real Prometheus from before its start to after its end."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from chart_tools import prometheus
from stack import Stack
from waiting import wait_until

from syncline.runtime.trace_store import SpanRecord, spans_of

# lengths of 1 to 32 tokens, and both modes
SPEC: dict[str, Any] = {
    "name": "seen",
    "model": {"name": "tiny-moe"},
    "task": {"environment": "characters", "options": {"game": "kind", "length": 32, "alphabet": "ab12"}},
    "sampling": {"max_tokens": 32},
    "batch": {"groups": 4, "group_size": 4},
    "optimizer": {"lr": 2e-3},
    "schedule": {
        "mode": "colocated",
        "updates": 8,
        "max_lag": 2,
        "in_flight": "in_place",
        "switches": [{"at_update": 3, "mode": "disjoint"}],
    },
    "rollout": {"workers": 2, "pace": [1.0, 0.2]},  # the slow one samples on while versions come
    "checkpoint": {"every": 4},
    "diagnostics": {"learn": 2},  # a baseline within 8 updates, of which some have no same-version trajectory
}


class Prometheus:
    """A real server that scrapes one target twice a second: the job may last for a few."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        scraped = {"job_name": "syncline", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
            "scrape_configs": [scraped],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        flags = {"config.file": str(folder / "prometheus.yml"), "storage.tsdb.path": str(folder / "tsdb")}
        flags |= {"web.listen-address": f"127.0.0.1:{port}", "log.level": "warn"}
        log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [str(prometheus()), *(f"--{name}={value}" for name, value in flags.items())],
            stdout=log,
            stderr=log,
        )
        log.close()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30)
        self.began = time.time()
        wait_until(self._answers, 30, "Prometheus answers")

    def _answers(self) -> bool:
        try:
            return self.http.get("/status/runtimeinfo").status_code == 200
        except httpx.TransportError:
            return False

    def range(self, expr: str) -> list[dict[str, Any]]:
        """Series from its start until now that have a finite value."""
        asked: dict[str, str | float] = {"query": expr, "start": self.began, "end": time.time(), "step": 0.5}
        answer = self.http.get("/query_range", params=asked)
        assert answer.status_code == 200, f"{expr}: {answer.text}"
        series: list[dict[str, Any]] = answer.json()["data"]["result"]
        return [one for one in series if any(math.isfinite(float(value)) for _, value in one["values"])]

    def newest(self, expr: str) -> dict[str, float]:
        """Value by the series' labels, now."""
        answer = self.http.get("/query", params={"query": expr}).json()["data"]["result"]
        return {json.dumps(one["metric"], sort_keys=True): float(one["value"][1]) for one in answer}

    def stop(self) -> None:
        """End it."""
        self.http.close()
        self._process.terminate()
        assert self._process.wait(30) == 0


class Seen:
    """What a job left: in the stack, in Prometheus, and in the span store."""

    def __init__(self, folder: Path) -> None:
        self.stack = Stack(folder / "runs").up()
        try:
            self.prometheus = Prometheus(folder, self.stack.url)
        except BaseException:
            self.stack.down()
            raise
        try:
            self.job = self.stack.submit(SPEC)
            self.status = self.stack.wait(self.job, 240)
            wait_until(self._scraped_to_the_end, 30, "a scrape after the end")
        except BaseException:
            self.close()
            raise

    def _scraped_to_the_end(self) -> bool:
        return bool(self.prometheus.newest(f'syncline_job_info{{job_id="{self.job}",state="succeeded"}}'))

    def spans(self) -> list[SpanRecord]:
        """All of the job's."""
        return spans_of(self.stack.runs / "traces.sqlite", job=self.job)

    def close(self) -> None:
        """Stop all."""
        self.prometheus.stop()
        self.stack.down()

"""Does a large job make the gateway slower? Submit and lineage at 100,000 trajectories beside 1,000.

    python bench/gateway_growth.py                      # some 5 minutes and 2 GB of disk
    python bench/gateway_growth.py --large 10048 --calls 50 --json runs/gateway_growth.json

Two installations at once, each a Redis, a span store, a job folder (`left_job.py`) and a gateway process, one with a
small job and one with a large. One client asks them in turns over HTTP, so that whatever else the machine does falls on
both. Times are of whole requests, the client's part included. First the job runs; then it ends, the gateway writes its
report, Redis forgets all, and lineage comes from its folder alone.

    submit          POST of a job spec, 201; no scheduler runs, so it stays queued
    trajectory      GET of a trained one, of a filtered one, of one that waits, of one that there is not
    token           GET of one token's path
    page            100 trajectories from anywhere: of all, of a state, of an update; and what runs now
    version         GET of one version; ten of them from anywhere

The first question about a job's folder builds an index and is told apart.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec
from left_job import UNSCORED, LeftJob, wait_for
from rows import MODELS, Row, Say, document, machine, note, table
from server import own_server
from stream_stages import BATCH, GROUP

from syncline.contract.streams import JOB
from syncline.contract.token_path import trajectory_id
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings

COMMAND = "python bench/gateway_growth.py"
SPEC = {
    "name": "growth",
    "model": {"name": "tiny-moe", "weights": "random"},
    "batch": {"groups": BATCH // GROUP, "group_size": GROUP},
    "schedule": {"mode": "disjoint", "max_lag": 1000, "updates": 1_000_000},
}
PAGE = 10  # versions, of which a job of 1,000 trajectories has 17
Call = Callable[[], httpx.Response]


class Side:
    """One installation with a job of `updates` updates, and its gateway."""

    def __init__(self, url: str, folder: Path, updates: int) -> None:
        self.updates, self.trajectories = updates, updates * BATCH
        (folder / "runs").mkdir()
        names = {"REDIS_URL": url, "RUNS": str(folder / "runs"), "MODELS": str(MODELS)}
        self.settings = Settings.read({f"SYNCLINE_{name}": value for name, value in names.items()})
        self.bus = Bus(url)
        environment = self.settings.inherited(os.environ) | {
            "SYNCLINE_PORT": "0",
            "SYNCLINE_TRACES_DAYS": "0",
        }
        log = (folder / "gateway.log").open("wb")
        self._gateway = subprocess.Popen(
            [sys.executable, "-m", "syncline.gateway"], env=environment, stdout=log, stderr=log
        )
        told = self.settings.runs / "gateway.json"
        wait_for(told, 60)
        self.http = httpx.Client(base_url=msgspec.json.decode(told.read_bytes())["url"], timeout=60)
        self.job = self.submit().json()["id"]
        self.bus.hset(JOB.at(self.job), "state", "running")
        self._chance = random.Random(updates)
        self._left = LeftJob(url, self.settings, self.job, updates)
        self._left.lead()

    # ---- what is asked ----
    def submit(self) -> httpx.Response:
        return self.http.post("/v1/jobs", json=SPEC)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(f"/v1/jobs/{self.job}{path}")

    def trained(self) -> str:
        return self._some(self._chance.randrange(UNSCORED))

    def filtered(self) -> str:
        return self._some(UNSCORED)

    def waiting(self) -> str:
        return self._some(self._chance.randrange(UNSCORED), self.updates + 1)

    def unknown(self) -> str:
        return trajectory_id(self.job, 10**9 + self._chance.randrange(10**6), 0)

    def update(self) -> int:
        return self._chance.randrange(1, self.updates + 1)

    def early(self) -> VersionId:
        """A version that a page of others follows, where there are as many."""
        return VersionId(0, self._chance.randrange(max(1, self.updates - PAGE + 1)))

    def _some(self, group: int, update: int | None = None) -> str:
        """A trajectory of this group of an update's batch."""
        at = self.update() if update is None else update
        return trajectory_id(self.job, (at - 1) * (BATCH // GROUP) + group, self._chance.randrange(GROUP))

    def forget(self) -> None:
        """The job ends, the gateway writes its report, Redis starts anew."""
        ledger = self._left.ledger()
        for entry in ledger.open_lines():
            ledger.end(entry.trajectory, "expired", "job ended")
        self.bus.hset(JOB.at(self.job), {"state": "succeeded", "ended": repr(time.time())})
        wait_for(self.settings.job_dir(self.job) / "summary.json", 300)
        self.bus.call("FLUSHALL")

    def close(self) -> None:
        self.http.close()
        self._gateway.terminate()
        self._gateway.wait(30)
        self._left.close()
        self.bus.close()


def lineage(side: Side) -> dict[str, tuple[Call, int]]:
    """Questions about a job, with the status of their answers; they hold whether Redis knows it or not."""
    pages = "/trajectories?limit=100"
    return {
        "trajectory, trained": (lambda: side.get(f"/trajectories/{side.trained()}"), 200),
        "trajectory, filtered": (lambda: side.get(f"/trajectories/{side.filtered()}"), 200),
        "trajectory, unknown": (lambda: side.get(f"/trajectories/{side.unknown()}"), 404),
        "token": (lambda: side.get(f"/trajectories/{side.trained()}/tokens/3"), 200),
        "page": (lambda: side.get(f"{pages}&after={side.trained()}"), 200),
        "page of a state": (lambda: side.get(f"{pages}&state=filtered&after={side.trained()}"), 200),
        "page of an update": (lambda: side.get(f"{pages}&update={side.update()}"), 200),
        "version": (lambda: side.get(f"/versions/{side.update()}"), 200),
        "page of versions": (lambda: side.get(f"/versions?limit={PAGE}&after={side.early()}"), 200),
    }


def live(side: Side) -> dict[str, tuple[Call, int]]:
    """Questions about a job that runs."""
    return {
        "submit": (side.submit, 201),
        **lineage(side),
        "trajectory, waiting": (lambda: side.get(f"/trajectories/{side.waiting()}"), 200),
        "page of a state that none has": (lambda: side.get("/trajectories?limit=100&state=failed"), 200),
        "page of what runs": (lambda: side.get("/trajectories?limit=100&state=running"), 200),
    }


def measure(small: int, large: int, calls: int) -> list[Row]:
    """The rows of this part, for jobs of that many trajectories."""
    say = Say("gateway growth", COMMAND)
    with ExitStack() as stack:
        sides = []
        for count in (small, large):
            updates = max(1, round(count / BATCH))
            note(f"gateway growth: a job of {updates * BATCH:,} trajectories")
            sides.append(stack.enter_context(installation(updates)))
        note("gateway growth: while the jobs run")
        told = _compare(say, "running", [live(side) for side in sides], calls, sides)
        note("gateway growth: the jobs end")
        for side in sides:
            side.forget()
        first = [_seconds(*lineage(side)["trajectory, filtered"]) for side in sides]
        note("gateway growth: from the folder alone")
        told += _compare(say, "forgotten", [lineage(side) for side in sides], calls, sides)
        case = f"forgotten, {sides[1].trajectories:,} trajectories"
        say.time(case, "first question about the folder", [1e3 * first[1]], "ms")
    note(f"gateway growth: {told} calls")
    return say.rows


@contextmanager
def installation(updates: int) -> Iterator[Side]:
    with own_server() as url, tempfile.TemporaryDirectory(prefix="sl-growth-") as folder:
        side = Side(url, Path(folder), updates)
        try:
            yield side
        finally:
            side.close()


def _compare(
    say: Say, state: str, both: list[dict[str, tuple[Call, int]]], calls: int, sides: list[Side]
) -> int:
    """Each question to both in turns; the ratios of their percentiles."""
    against = f"itself at {sides[0].trajectories:,}"
    for name in both[0]:
        note(f"gateway growth: {state}, {name}")
        took: list[list[float]] = [[], []]
        for call, status in (one[name] for one in both):
            _seconds(call, status)  # caches and connections
        for _ in range(calls):
            for mine, one in zip(took, both, strict=True):
                mine.append(_seconds(*one[name]))
        case = f"{state}, {sides[1].trajectories:,} trajectories: {name}"
        for label, share in (("p99", 0.99), ("p50", 0.5)):
            small, large = (_percentile(one, share) for one in took)
            say.ratio(case, label, [large / small], against)
            say.time(case, f"{label}, large", [1e3 * large], "ms")
            say.time(case, f"{label}, small", [1e3 * small], "ms")
    return 2 * calls * len(both[0])


def _seconds(call: Call, status: int) -> float:
    began = time.perf_counter()
    answer = call()
    took = time.perf_counter() - began
    if answer.status_code != status:
        raise RuntimeError(f"{answer.request.url}: {answer.status_code}, {answer.text[:300]}")
    return took


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", type=int, default=1000, help="trajectories (default: 1,000)")
    parser.add_argument("--large", type=int, default=100_000, help="trajectories (default: 100,000)")
    parser.add_argument("--calls", type=int, default=600, help="of each kind and side (default: 600)")
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts there")
    given = parser.parse_args()
    facts, started = machine(), time.monotonic()
    rows = measure(given.small, given.large, given.calls)
    print(table(rows))
    if given.json is not None:
        told = document(rows, facts, given.large < 100_000, time.monotonic() - started)
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")

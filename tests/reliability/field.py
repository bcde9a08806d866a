"""Everything around a trainer, played by the test over a real Redis: scheduler, rollout workers, errands.

The workers are the product's own intake and publishing on the ledger, without a model: they take work items, begin,
keep them alive, take over from the silent, and post. What is posted twice, late, or never is up to the test.
"""

from __future__ import annotations

import os
import random
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from waiting import wait_until

from syncline.contract import events
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVENTS, LOCK, PHASE, PHASES, VERSIONS, WORK
from syncline.contract.token_path import (
    Reward,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    check,
    trajectory_id,
)
from syncline.contract.version_path import VersionId, parse_version
from syncline.rollout.intake import Held, Intake
from syncline.runtime.bus import Bus, pack, unpack
from syncline.runtime.ledger import Ledger
from syncline.runtime.settings import Settings
from syncline.runtime.tracing import new_traceparent

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
ROOM = 4  # requests that a worker runs at once
TRACE = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def spec_of(**parts: Any) -> JobSpec:
    """A small job: 2 groups of 2, 6 updates, a checkpoint every 2."""
    base: dict[str, Any] = {
        "name": "fingerprint",
        "model": {"name": "tiny-dense"},
        "batch": {"groups": 2, "group_size": 2},
        "schedule": {"mode": "disjoint", "updates": 6, "max_lag": 2},
        "checkpoint": {"every": 2, "keep": 2},
        "diagnostics": {"trajectories": 0},
        "limits": {"batch_wait": 30.0, "attempts": 3},
    }
    for name, part in parts.items():
        base[name] = {**base[name], **part} if isinstance(base.get(name), dict) else part
    return JobSpec.model_validate_json(msgspec.json.encode(base))


def record_of(
    item: events.WorkItem, attempt: int, version: VersionId, contract: str, worker: str
) -> Trajectory:
    """A record whose contents follow from its work item and attempt."""
    drawn = random.Random(f"{item.trajectory}/{attempt}")
    count, prompt = drawn.randint(4, 8), 3
    return check(
        Trajectory(
            job=item.job,
            trajectory=item.trajectory,
            group=item.group,
            index=item.index,
            attempt=attempt,
            prompt=item.prompt,
            tokens=array("i", [drawn.randrange(3, 100) for _ in range(prompt + count)]),
            segments=(
                Segment(kind="prompt", start=0, end=prompt),
                Segment(kind="sampled", start=prompt, end=prompt + count),
            ),
            logprobs=array("f", [-1.0] * count),
            loss_mask=bytes([1] * count),
            spans=(VersionSpan(start=0, end=count, version=version, digest="d", worker=worker),),
            convention=SamplingConvention(temperature=1.0),
            finish="length",
            contract=contract,
            text="x",
            traceparent=item.traceparent or TRACE,
            timing=Timing(started=1.0, queued=0.1, prefill=0.1, decode=0.1),
        )
    )


class Worker:
    """One rollout worker without a model. `posts`: how often it posts each record; `slow`: it posts nothing now."""

    def __init__(self, field: Field, name: str, idle: float = 0.5) -> None:
        self.field, self.name, self.idle = field, name, idle
        self.posts, self.slow, self.fenced = 1, False, 0
        self.intake = Intake(field.bus, field.ledger, field.job, name, idle)
        self.intake.recover()

    def turn(self, version: VersionId) -> None:
        if self.slow:
            return
        self.intake.keep_alive()
        self.intake.take(ROOM)
        begun: list[Held] = []
        self.intake.begin(version, ROOM, begun.append)
        self.post([held for held in self.intake.held.values() if held.begun is not None])

    def post(self, held: Sequence[Held]) -> None:
        """Publish what was begun, as often as told."""
        for one in held:
            assert one.version is not None
            record = record_of(one.item, one.attempt, one.version, self.field.contract, self.name)
            if one.item.trajectory not in self.intake.held:
                continue
            for _ in range(self.posts):
                answer = self.field.ledger.publish(record, one.work_id)
                self.fenced += answer == "fenced"
            self.intake.drop(one.item.trajectory)
            if answer == "published":
                self.field.errand(record)

    def restart(self) -> None:
        """Dies and comes back under its name."""
        self.intake = Intake(self.field.bus, self.field.ledger, self.field.job, self.name, self.idle)
        self.intake.recover()


class Field:
    """One job around its trainer. `rewards`: how often each errand is carried out."""

    def __init__(self, redis_url: str, job: str, runs: Path, spec: JobSpec, deadline: float = 20.0) -> None:
        self.bus = Bus(redis_url, deadline=deadline)
        self.job, self.spec, self.folder = job, spec, runs / job
        self.folder.mkdir(parents=True)
        (self.folder / "spec.json").write_text(spec.model_dump_json())
        self.settings = Settings(redis_url=redis_url, runs=runs, models=MODELS, job=job, port=0)
        self.ledger = Ledger.under(self.bus, job, spec)
        self.contract = spec.contract_digest()
        self.submitted: set[int] = set()
        self.kept: tuple[Path, VersionId] | None = (
            None  # a copy of the server's data, and the version of its time
        )
        self.before: Callable[[Field], None] | None = None
        self.reward_times, self.drop_errands = 1, False
        self.held_back = 0  # groups of the last updates that are not submitted yet: the job cannot end before
        self.held_errands: list[Trajectory] = []
        self._next, self._looked = 0, time.monotonic()
        self.order()
        self.workers = [Worker(self, "w0"), Worker(self, "w1")]

    def environ(self) -> dict[str, str]:
        """Of the trainer's process."""
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
        return {**keep, "OMP_NUM_THREADS": "1", **self.settings.environ()}

    # ---- scheduler --------------------------------------------------------------------------------------
    def order(self) -> None:
        """Both awake, the gate open."""
        wanted = events.Phase(
            seq=1,
            mode="disjoint",
            phase="flow",
            rollout="awake",
            trainer="awake",
            gate="open",
            update=0,
            at=time.time(),
        )
        self.bus.set(PHASE.at(self.job), pack(wanted))
        self.bus.append(PHASES.at(self.job), wanted)

    def feed(self, least: int = 0) -> None:
        """Submit while there are credits, and never more than the remaining updates can use.

        least   groups that are to be open whatever is held back. An update's groups end a moment before its version
                is there; what is submitted in between may use up what was held back.
        """
        batch, schedule = self.spec.batch.groups, self.spec.schedule
        made = max((v.number for v in self.versions()), default=0)
        room = (schedule.updates - made) * batch - self.held_back - self.ledger.open_groups()
        room = min(room, (schedule.max_lag + 1) * batch - self.ledger.open_groups())
        room = max(room, least - self.ledger.open_groups())
        for _ in range(room):
            group, self._next = self._next, self._next + 1
            items = [self.item(group, i) for i in range(self.spec.batch.group_size)]
            self.submitted.add(group)
            self.ledger.submit(items, len(items))

    def scheduler_restarts(self) -> None:
        """It goes on where Redis says: groups that the server has forgotten are submitted again."""
        known = {line.group for line in self.ledger.entries(self.names()).values()}
        self._next = min(
            self.submitted - known, default=self._next
        )  # what is known after it is submitted in vain

    def item(self, group: int, index: int) -> events.WorkItem:
        return events.WorkItem(
            job=self.job,
            trajectory=trajectory_id(self.job, group, index),
            group=group,
            index=index,
            prompt=group,
            traceparent=new_traceparent(),
            submitted_at=time.time(),
        )

    def repair(self, every: float = 0.5) -> None:
        """What the scheduler does now and then: lost work goes back, lost errands go out again."""
        if time.monotonic() - self._looked < every:
            return
        self._looked = time.monotonic()
        for entry in self.ledger.lost_work():
            self.ledger.resubmit(self.item(entry.group, entry.index))
        for entry in self.ledger.unrewarded(every):
            self.reward(entry.trajectory, entry.attempt, entry.group, entry.index)

    # ---- errands ----------------------------------------------------------------------------------------
    def errand(self, record: Trajectory) -> None:
        if not self.drop_errands:
            for _ in range(self.reward_times):
                self.reward(record.trajectory, record.attempt, record.group, record.index)

    def reward(self, trajectory: str, attempt: int, group: int, index: int) -> bool:
        value = (group + index) % 2 + 0.1 * index
        return self.ledger.reward(
            Reward(
                trajectory=trajectory,
                attempt=attempt,
                state="scored",
                value=value,
                reason="",
                judge="test/1",
                seconds=0.01,
            )
        )

    # ---- looking ----------------------------------------------------------------------------------------
    def versions(self) -> list[VersionId]:
        fields = self.bus.hgetall(VERSIONS.at(self.job))
        return sorted(parse_version(name.decode()) for name in fields if name != b"latest")

    def said(self) -> list[events.Event]:
        return [unpack(entry, events.Event) for entry in self.bus.range(EVENTS.at(self.job))]

    def finished(self) -> bool:
        said = self.said()
        failed = [event for event in said if isinstance(event, events.Failed)]
        assert not failed, failed
        return any(isinstance(event, events.Finished) for event in said)

    # ---- time -------------------------------------------------------------------------------------------
    def turn(self) -> None:
        """One round of everybody but the trainer."""
        before, self.before = self.before, None  # a harm may let turns pass
        if before is not None:
            before(self)
            self.before = before
        versions = self.versions()
        if versions:
            self.feed()
            for worker in self.workers:
                worker.turn(versions[-1])
            self.repair()

    def until(self, predicate: Callable[[], Any], seconds: float, what: str) -> None:
        """Turn after turn until `predicate`; fails after `seconds`."""

        def turned() -> bool:
            self.turn()
            return bool(predicate())

        wait_until(turned, seconds, what, every=0.01)

    def end(self) -> None:
        """What the scheduler does with an ended job: nothing stays open."""
        for entry in self.ledger.open_lines():
            if entry.state in ("running", "buffered"):
                self.ledger.end(entry.trajectory, "expired", "job ended")

    def lease_runs_out(self) -> None:
        """Time passes for the lease of a dead trainer: its successor need not wait in the test."""
        self.bus.delete(LOCK.at(f"{self.job}/trainer"))

    def work_length(self) -> int:
        return self.bus.length(WORK.at(self.job))

    def names(self) -> list[str]:
        """Every trajectory that was submitted."""
        size = self.spec.batch.group_size
        return [trajectory_id(self.job, group, i) for group in sorted(self.submitted) for i in range(size)]

    def pause_until(self, end: float) -> None:
        """Nobody here does anything until `end`, by the monotonic clock."""
        wait_until(lambda: time.monotonic() >= end, end - time.monotonic() + 5, "time to pass", every=0.05)

    def close(self) -> None:
        self.bus.close()

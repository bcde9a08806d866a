"""The errands service as a process, and a job with buffered trajectories for it to score."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from waiting import wait_until

from syncline.contract.events import Heartbeat, WorkItem
from syncline.contract.job import JobSpec
from syncline.contract.streams import HEARTBEAT, JOB, REWARDS
from syncline.contract.token_path import (
    Reward,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    trajectory_id,
)
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.ledger import Ledger

HERE = Path(__file__).parent
TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
VERSION = VersionId(0, 0)


class ErrandsService:
    """`python -m syncline.errands` on a run root of its own."""

    def __init__(self, redis_url: str, runs: Path, *words: str) -> None:
        self.bus = Bus(redis_url)
        self.runs = runs
        self.words = words
        self.env = {
            **os.environ,
            "SYNCLINE_REDIS_URL": redis_url,
            "SYNCLINE_RUNS": str(runs),
            "PYTHONPATH": str(HERE),
        }
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start (again) and wait until it says that it is ready."""
        log = (self.runs / "errands.log").open("ab")
        command = [sys.executable, "-m", "syncline.errands", *self.words]
        self.process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)
        wait_until(self.beats, 30, "heartbeat of the errands service")
        return self.process

    def beats(self) -> bool:
        assert self.process.poll() is None, self.log()
        raw = self.bus.get(HEARTBEAT.at("errands/errands"))
        return raw is not None and unpack(raw, Heartbeat).pid == self.process.pid

    def log(self) -> str:
        return (self.runs / "errands.log").read_text()

    def launch_again(self) -> None:
        """What a launcher does: start the service anew if it has ended."""
        if self.process.poll() is not None:
            assert self.process.returncode == 1, self.log()
            self.start()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self.bus.close()
        return code


class ScoredJob:
    """A job whose trajectories are buffered, one group, ready to be scored."""

    def __init__(
        self, bus: Bus, job: str, reward: Mapping[str, Any], texts: Sequence[str], **parts: Any
    ) -> None:
        self.bus, self.job = bus, job
        spec = JobSpec.model_validate(
            {"name": "scored", "model": {"name": "tiny-dense"}, "reward": dict(reward), **parts}
        )
        bus.hset(JOB.at(job), "spec", spec.canonical())
        self.ledger = Ledger(bus, job, batch_groups=1, max_lag=1, policy="wait", max_attempts=5)
        self.names = [trajectory_id(job, 0, index) for index in range(len(texts))]
        items = [self._item(index) for index in range(len(texts))]
        assert self.ledger.submit(items, len(texts))
        for name, text in zip(self.names, texts, strict=True):
            entry = self.ledger.entry(name)
            assert entry is not None
            assert entry.work_id is not None
            assert self.ledger.begin(name, 1, "w0", VERSION) == "go"
            assert self.ledger.publish(self._record(name, text), entry.work_id) == "published"

    def rewards(self) -> dict[str, Reward]:
        """Rewards so far."""
        fields = self.bus.hgetall(REWARDS.at(self.job))
        return {name.decode(): unpack(raw, Reward) for name, raw in fields.items()}

    def all_rewards(self, seconds: float = 30) -> list[Reward]:
        """Every member's reward, in order, once all are there."""

        def there() -> list[Reward] | None:
            found = self.rewards()
            return [found[name] for name in self.names] if len(found) == len(self.names) else None

        return wait_until(there, seconds, f"{len(self.names)} rewards") or []

    def _item(self, index: int) -> WorkItem:
        name = self.names[index]
        return WorkItem(
            job=self.job, trajectory=name, group=0, index=index, prompt=0, traceparent=TRACE, submitted_at=0.0
        )

    def _record(self, name: str, text: str) -> Trajectory:
        return Trajectory(
            job=self.job,
            trajectory=name,
            group=0,
            index=self.names.index(name),
            attempt=1,
            prompt=0,
            tokens=array("i", [1, 5, 6]),
            segments=(Segment(kind="prompt", start=0, end=1), Segment(kind="sampled", start=1, end=3)),
            logprobs=array("f", [-0.5, -0.5]),
            loss_mask=b"\1\1",
            spans=(VersionSpan(start=0, end=2, version=VERSION, digest="d", worker="w0"),),
            convention=SamplingConvention(),
            finish="stop",
            contract="c",
            text=text,
            traceparent=TRACE,
            timing=Timing(started=0.0, queued=0.0, prefill=0.0, decode=0.0),
        )

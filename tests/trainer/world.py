"""Everything around a trainer, played by the test over the real Redis: scheduler, rollout and errands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from trainer_records import reward, trajectory
from waiting import wait_until

from syncline.contract import events
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVENTS, METRICS, MINTED, PHASE, PHASES
from syncline.contract.token_path import Trajectory, trajectory_id
from syncline.contract.version_path import Minted, VersionId
from syncline.runtime.bus import Bus, pack, unpack
from syncline.runtime.ledger import Ledger
from syncline.runtime.service import ServiceContext
from syncline.runtime.settings import Settings
from syncline.runtime.tracing import new_traceparent
from syncline.trainer import loop

Rewards = Callable[[int, int], float | None]
"""(group, index) -> reward."""

MODELS = Path(__file__).parents[2] / "examples" / "models"


def spec_of(**parts: Any) -> JobSpec:
    """A small job: 2 groups of 2, a checkpoint every 2 updates."""
    base: dict[str, Any] = {
        "name": "t",
        "model": {"name": "tiny-dense"},
        "batch": {"groups": 2, "group_size": 2},
        "schedule": {"mode": "disjoint", "updates": 4, "max_lag": 1},
        "checkpoint": {"every": 2, "keep": 2},
        "optimizer": {"lr": 0.01},
        "limits": {"batch_wait": 20.0},
    }
    for name, part in parts.items():
        base[name] = {**base[name], **part} if isinstance(base.get(name), dict) else part
    return JobSpec.model_validate_json(msgspec.json.encode(base))


class World:
    """One job. `seq` is the last phase ordered."""

    def __init__(self, redis_url: str, job: str, runs: Path, spec: JobSpec) -> None:
        self.bus = Bus(redis_url, deadline=10.0)
        self.job, self.runs, self.spec = job, runs, spec
        self.folder = runs / job
        self.folder.mkdir(parents=True)
        (self.folder / "spec.json").write_text(spec.model_dump_json())
        self.settings = Settings(redis_url=redis_url, runs=runs, models=MODELS, job=job, port=0)
        self.ledger = Ledger(
            self.bus,
            job,
            batch_groups=spec.batch.groups,
            max_lag=spec.schedule.max_lag,
            policy=spec.schedule.lag_policy,
            max_attempts=spec.limits.attempts,
        )
        self.seq = 0
        self.groups = 0

    # ---- scheduler --------------------------------------------------------------------------------------
    def order(self, phase: events.PhaseName, trainer: Literal["awake", "asleep"]) -> int:
        """Want a phase; returns its number."""
        self.seq += 1
        wanted = events.Phase(
            seq=self.seq,
            mode="disjoint" if phase == "flow" else "colocated",
            phase=phase,
            rollout="awake" if phase == "flow" else "asleep",
            trainer=trainer,
            gate="open" if phase == "flow" else "shut",
            update=0,
            at=time.time(),
        )
        self.bus.set(PHASE.at(self.job), pack(wanted))
        self.bus.append(PHASES.at(self.job), wanted)
        return self.seq

    # ---- rollout and errands ----------------------------------------------------------------------------
    def begin(self, groups: int, version: int = 0, epoch: int = 0) -> list[int]:
        """Submit whole groups and begin them under `version`; returns their numbers."""
        made = []
        for _ in range(groups):
            group, self.groups = self.groups, self.groups + 1
            size = self.spec.batch.group_size
            items = [
                events.WorkItem(
                    job=self.job,
                    trajectory=trajectory_id(self.job, group, i),
                    group=group,
                    index=i,
                    prompt=group,
                    traceparent=new_traceparent(),
                    submitted_at=time.time(),
                )
                for i in range(size)
            ]
            assert self.ledger.submit(items, size)
            for item in items:
                begun = self.ledger.begin(item.trajectory, 1, "w0", VersionId(epoch, version))
                assert begun == "go", (group, begun)
            made.append(group)
        return made

    def publish(
        self,
        group: int,
        versions: tuple[int, ...] = (0,),
        epoch: int = 0,
        rewards: Rewards | None = None,
        sampled: int | None = None,
    ) -> list[Trajectory]:
        """Publish and reward a begun group's members, each sampled under `versions`."""
        made = []
        for i in range(self.spec.batch.group_size):
            t = trajectory(
                self.job,
                group,
                i,
                epoch=epoch,
                versions=versions,
                sampled=sampled,
                contract=self.spec.contract_digest(),
            )
            work = self.ledger.entry(t.trajectory)
            assert work is not None
            assert work.work_id is not None
            assert self.ledger.publish(t, work.work_id) == "published"
            value = (group + i) % 2 + 0.1 * i if rewards is None else rewards(group, i)
            assert self.ledger.reward(reward(t, value))
            made.append(t)
        return made

    def feed(
        self, groups: int, version: int = 0, epoch: int = 0, rewards: Rewards | None = None
    ) -> list[Trajectory]:
        """Submit, sample under `version` and reward whole groups."""
        numbers = self.begin(groups, version, epoch)
        return [t for group in numbers for t in self.publish(group, (version,), epoch, rewards)]

    # ---- looking ----------------------------------------------------------------------------------------
    def said(self) -> list[events.Event]:
        return [unpack(entry, events.Event) for entry in self.bus.range(EVENTS.at(self.job))]

    def minted(self) -> list[Minted]:
        return [unpack(entry, Minted) for entry in self.bus.range(MINTED.at(self.job))]

    def versions(self) -> list[VersionId]:
        return [m.version for m in self.minted()]

    def metrics(self) -> list[events.UpdateMetrics]:
        return [unpack(entry, events.UpdateMetrics) for entry in self.bus.range(METRICS.at(self.job))]

    def await_version(self, version: VersionId, seconds: float = 60.0) -> Minted:
        """The version once it is minted; fails at once if the trainer reported a failure."""

        def look() -> list[Minted]:
            failed = [e for e in self.said() if isinstance(e, events.Failed)]
            assert not failed, failed
            return [m for m in self.minted() if m.version == version]

        return wait_until(look, seconds, f"version {version}")[0]


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the trainer runs after it."""


class InProcess:
    """The trainer's main function in a thread of the test."""

    def __init__(self, world: World) -> None:
        self.ctx = ServiceContext("trainer", world.settings, Bus(world.settings.redis_url, deadline=10.0))
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            loop.main(self.ctx)
        except BaseException as error:  # noqa: BLE001 - raised again by `stop`
            self.error = error

    def died(self) -> bool:
        """Whether it was killed. An error of its own is raised."""
        if self.error is not None and not isinstance(self.error, Killed):
            raise self.error
        return self.error is not None

    def forget(self) -> None:
        """End what is left of a killed one, and let its lease run out."""
        self.ctx.stopping.set()
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.ctx._ended.set()
        for thread in threading.enumerate():
            if thread.name == "lease-trainer":
                thread.join(10)
        for lease in self.ctx._leases:
            lease.release()
        self.ctx.bus.close()

    def stop(self) -> None:
        """Tell it to stop, wait, and raise what it ended with."""
        self.forget()
        if self.error is not None:
            raise self.error


class Process:
    """The trainer as the launcher starts it."""

    def __init__(self, world: World, **more: str) -> None:
        environ = {**os.environ, **world.settings.environ(), "OMP_NUM_THREADS": "1", **more}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "syncline.trainer"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(10)

    def stop(self) -> str:
        """SIGTERM; returns the log. Fails unless the exit code is 0."""
        self.child.send_signal(signal.SIGTERM)
        log = self.child.communicate(timeout=30)[0].decode()
        assert self.child.returncode == 0, log
        return log

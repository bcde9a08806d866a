"""Everything around rollout workers, played by the test over the real Redis: scheduler, trainer and sync."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from conformance.forge import MODELS, Forge, cold_logprobs
from waiting import wait_until

from syncline.contract import events
from syncline.contract.job import JobSpec
from syncline.contract.streams import ACKS, EVENTS, JOB, PHASE, PHASES, SYNC, TRAJECTORIES, WORKERS
from syncline.contract.token_path import Trajectory, trajectory_id
from syncline.contract.trajectory_wire import decode
from syncline.contract.version_path import Ack, Canary, SyncOrder, VersionId
from syncline.runtime.bus import Bus, pack, unpack
from syncline.runtime.ledger import Ledger
from syncline.runtime.settings import Settings
from syncline.runtime.tracing import new_traceparent

E = TypeVar("E", bound=msgspec.Struct)
SECONDS = 60.0  # a process imports torch first, on a machine that other tests use too


def spec_of(**parts: Any) -> JobSpec:
    """A small job on the tiny MoE: groups of 4, responses of log-normal length."""
    base: dict[str, Any] = {
        "name": "t",
        "model": {"name": "tiny-moe"},
        "sampling": {"max_tokens": 40, "length": "lognormal", "length_median": 12},
        "batch": {"groups": 4, "group_size": 4},
        "schedule": {"mode": "disjoint", "updates": 50, "max_lag": 8},
        "rollout": {"workers": 2},
        "limits": {"worker_idle": 2.0},
    }
    for name, part in parts.items():
        base[name] = {**base[name], **part} if isinstance(base.get(name), dict) else part
    return JobSpec.model_validate_json(msgspec.json.encode(base))


class World:
    """One job, its streams, and the worker processes that the test starts."""

    def __init__(self, redis_url: str, job: str, runs: Path, spec: JobSpec) -> None:
        self.bus = Bus(redis_url, deadline=10.0)
        self.job, self.spec = job, spec
        self.settings = Settings(redis_url=redis_url, runs=runs, models=MODELS, job=job, port=0)
        folder = runs / job
        folder.mkdir(parents=True)
        (folder / "key").write_bytes(b"a key of this job")
        self.logs = folder
        self.forge = Forge(
            folder, MODELS / spec.model.name, job, b"a key of this job", contract=spec.contract()
        )
        self.bus.hset(JOB.at(job), "spec", spec.canonical())
        self.ledger = Ledger(
            self.bus,
            job,
            batch_groups=spec.batch.groups,
            max_lag=spec.schedule.max_lag,
            policy=spec.schedule.lag_policy,
            max_attempts=spec.limits.attempts,
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self._starts: Counter[str] = Counter()
        self._phase = self._order = -1
        self._groups = 0

    # ---- processes
    def start(self, name: str = "w0") -> subprocess.Popen[bytes]:
        environ = {**os.environ, **self.settings.environ(), "SYNCLINE_WORKER": name}
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", "syncline.rollout"], env=environ, stderr=log)
        self.processes.append(process)
        self._starts[name] += 1
        return process

    def log(self, name: str = "w0") -> str:
        return (self.logs / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.bus.close()

    # ---- scheduler
    def phase(
        self,
        rollout: Literal["awake", "asleep"] = "awake",
        gate: Literal["open", "shut"] = "open",
        mode: Literal["colocated", "disjoint"] = "disjoint",
        workers: int = 0,
    ) -> int:
        """Order a phase; returns its number."""
        self._phase += 1
        wanted = events.Phase(
            seq=self._phase,
            mode=mode,
            phase="flow" if mode == "disjoint" else "sample",
            rollout=rollout,
            trainer="awake",
            gate=gate,
            update=0,
            workers=workers,
            at=time.time(),
        )
        self.bus.set(PHASE.at(self.job), pack(wanted))
        self.bus.append(PHASES.at(self.job), wanted)
        return self._phase

    def submit(self, groups: int = 1) -> list[str]:
        """Submit groups; returns the trajectories."""
        made = []
        size = self.spec.batch.group_size
        for group in range(self._groups, self._groups + groups):
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
            made += [item.trajectory for item in items]
        self._groups += groups
        return made

    def event(self, type: type[E], suits: Callable[[E], bool] = lambda event: True) -> E:
        """Wait for an event of this type that suits."""

        def found() -> E | None:
            for entry in self.bus.range(EVENTS.at(self.job)):
                event = unpack(entry, events.Event)
                if isinstance(event, type) and suits(event):
                    return event
            return None

        return wait_until(lambda: found(), SECONDS, f"{type.__name__}") or self.event(type, suits)

    def status(self, name: str = "w0") -> events.WorkerStatus | None:
        raw = self.bus.hget(WORKERS.at(self.job), name)
        return None if raw is None else unpack(raw, events.WorkerStatus)

    # ---- trainer and sync
    def canary(self, number: int) -> Canary:
        ids = (1, *range(20, 40))
        return Canary(tokens=ids, prompt=3, logprobs=tuple(cold_logprobs(self.forge.cold(number), ids, 3)))

    def order(
        self,
        kind: Literal["stage", "commit", "abort"],
        number: int,
        *,
        canary_of: int | None = None,
        workers: tuple[str, ...] = (),
    ) -> int:
        """Order version 0.`number`; returns the order's number. `canary_of`: another version's scores."""
        if kind == "stage" and VersionId(0, number) not in self.forge.store.manifests():
            self.forge.version(number)
        self._order += 1
        order = SyncOrder(
            order=kind,
            version=VersionId(0, number),
            digest=self.forge.manifest(number).digest(),
            workers=workers,
            seq=self._order,
            traceparent=new_traceparent(),
            canaries=(self.canary(number if canary_of is None else canary_of),) if kind == "stage" else (),
            tolerance=1e-3,
        )
        self.bus.append(SYNC.at(self.job), order)
        return self._order

    def acks(self) -> list[Ack]:
        return [unpack(entry, Ack) for entry in self.bus.range(ACKS.at(self.job))]

    def ack(self, kind: str, seq: int, worker: str = "w0") -> Ack:
        """Wait for this worker's ack of this kind to order `seq`."""

        def found() -> Ack | None:
            wanted = (kind, seq, worker)
            return next((a for a in self.acks() if (a.kind, a.seq, a.worker) == wanted), None)

        ack = wait_until(found, SECONDS, f"{worker} acks {kind} to order {seq}")
        assert ack is not None
        return ack

    def joined(self, name: str = "w0") -> None:
        """Wait until the newest process of this name has asked for a version."""

        def asked() -> bool:
            processes = {a.incarnation for a in self.acks() if a.kind == "joined" and a.worker == name}
            return len(processes) >= self._starts[name]

        wait_until(asked, SECONDS, f"{name} joins")

    def install(self, number: int, *workers: str) -> None:
        """Stage and commit version 0.`number` on these workers (default: w0)."""
        names = workers or ("w0",)
        for name in names:  # orders given before a process reads them are not for it
            self.joined(name)
        staged = self.order("stage", number, workers=names)
        for name in names:
            self.ack("verified", staged, name)
        committed = self.order("commit", number, workers=names)
        for name in names:
            self.ack("active", committed, name)

    # ---- what came out
    def published(self) -> list[Trajectory]:
        return [decode(entry.fields) for entry in self.bus.range(TRAJECTORIES.at(self.job))]

    def wait_published(self, trajectories: list[str]) -> dict[str, Trajectory]:
        """Wait until exactly these are published, each once."""
        wait_until(
            lambda: len(self.published()) >= len(trajectories), SECONDS, f"{len(trajectories)} published"
        )
        records = self.published()
        assert sorted(t.trajectory for t in records) == sorted(trajectories)
        return {t.trajectory: t for t in records}


@contextmanager
def world(redis_url: str, job: str, runs: Path, **parts: Any) -> Iterator[World]:
    """A world that ends its processes."""
    made = World(redis_url, job, runs, spec_of(**parts))
    try:
        yield made
    finally:
        made.close()

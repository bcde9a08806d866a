"""A rollout worker that speaks the protocol and holds no model, and sync as a real process beside it."""

from __future__ import annotations

import hashlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from syncline.contract.events import Event, Heartbeat, Phase, WorkerStatus
from syncline.contract.job import JobSpec
from syncline.contract.streams import ACKS, EVENTS, HEARTBEAT, JOB, PHASE, PHASES, SYNC, VERSIONS, WORKERS
from syncline.contract.version_path import (
    Ack,
    SyncOrder,
    VersionId,
    VersionRecord,
    loaded_digest,
    opened,
)
from syncline.runtime.bus import Bus, pack, unpack
from syncline.runtime.store import BlobStore

KEY = b"test key of the job"


class Installation:
    """One job's folder and Redis keys, and the sync process that can be killed and started again."""

    def __init__(self, url: str, job: str, runs: Path, retention: int = 2, wait: float = 60.0) -> None:
        self.bus, self.job, self.run, self._url, self._runs = Bus(url), job, runs / job, url, runs
        self.run.mkdir(parents=True)
        (self.run / "key").write_bytes(KEY)
        spec = {
            "name": "sync-test",
            "model": {"name": "tiny"},
            "retention": {"versions": retention},
            "limits": {"activation_wait": wait},
        }
        self.bus.hset(JOB.at(job), "spec", JobSpec.model_validate(spec).canonical())
        self.store = BlobStore(self.run / "store")
        self._process: subprocess.Popen[bytes] | None = None
        self._seq = 0

    def start(self) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            "SYNCLINE_REDIS_URL": self._url,
            "SYNCLINE_RUNS": str(self._runs),
            "SYNCLINE_JOB": self.job,
            "SYNCLINE_PORT": "0",
        }
        with (self.run / "sync.log").open("ab") as log:
            self._process = subprocess.Popen([sys.executable, "-m", "syncline.sync"], env=environ, stderr=log)
        return self._process

    def kill(self) -> None:
        """kill -9. The lease is dropped too: a test need not wait ten seconds for it to run out."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)
        self.bus.delete(f"syncline:lock:{self.job}/sync")

    def stop(self) -> int | None:
        if self._process is None or self._process.poll() is not None:
            return None
        self._process.terminate()
        return self._process.wait(30)

    def phase(self, mode: Literal["colocated", "disjoint"], rollout: Literal["awake", "asleep"]) -> None:
        self._seq += 1
        phase = Phase(
            seq=self._seq,
            mode=mode,
            phase="sync",
            rollout=rollout,
            trainer="asleep",
            gate="open",
            update=0,
            at=0.0,
        )
        self.bus.set(PHASE.at(self.job), pack(phase))
        self.bus.append(PHASES.at(self.job), phase)

    def record(self, version: VersionId) -> VersionRecord | None:
        raw = self.bus.hget(VERSIONS.at(self.job), str(version))
        return None if raw is None else msgspec.json.decode(raw, type=VersionRecord)

    def state_of(self, version: VersionId) -> str:
        record = self.record(version)
        return "" if record is None else record.state

    def events(self) -> list[Event]:
        return [unpack(entry, Event) for entry in self.bus.range(EVENTS.at(self.job))]

    def orders(self) -> list[SyncOrder]:
        return [unpack(entry, SyncOrder) for entry in self.bus.range(SYNC.at(self.job))]


class ScriptedWorker:
    """Obeys orders in a thread. `twist` may change or swallow (None) each ack before it is sent."""

    def __init__(
        self, place: Installation, name: str, twist: Callable[[Ack], Ack | None] = lambda ack: ack
    ) -> None:
        self._place, self.name, self._twist = place, name, twist
        self.incarnation = secrets.token_hex(4)
        self.active: VersionId | None = None
        self.digest = ""
        self.history: list[VersionId] = []  # versions committed, in order
        self.errors: list[str] = []
        self._staged: VersionId | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    def start(self) -> ScriptedWorker:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Dies without a word, as after kill -9; only the heartbeat's end is not waited for."""
        self._stop.set()
        self._thread.join(30)
        self._place.bus.delete(HEARTBEAT.at(f"{self._place.job}/rollout/{self.name}"))

    def _live(self) -> None:
        bus, job = self._place.bus, self._place.job
        cursor = bus.last_id(SYNC.at(job))
        asked = float("-inf")
        while not self._stop.is_set():
            self._beat()
            if self.active is None and time.monotonic() > asked + 1.0:
                asked = time.monotonic()  # again and again, as the real one does
                self._ack("joined", None, -1)
            for entry in bus.read({SYNC.at(job): cursor}, block=0.1).get(SYNC.at(job), []):
                cursor = entry.id
                order = unpack(entry, SyncOrder)
                if self.name in order.workers:
                    self._obey(order)

    def _beat(self) -> None:
        bus, job, now = self._place.bus, self._place.job, time.time()
        beat = Heartbeat(
            service="rollout",
            name=self.name,
            incarnation=self.incarnation,
            pid=1,
            port=None,
            ready=True,
            why="",
            at=now,
        )
        bus.set(HEARTBEAT.at(f"{job}/rollout/{self.name}"), pack(beat), ttl=5)
        status = WorkerStatus(
            worker=self.name,
            incarnation=self.incarnation,
            state="serving" if self.active else "empty",
            version=self.active,
            digest=self.digest,
            staged=self._staged,
            running=0,
            waiting=0,
            tokens=0,
            tokens_per_second=0.0,
            device="cpu",
            resident=0,
            why="",
            at=now,
        )
        bus.hset(WORKERS.at(job), self.name, pack(status))

    def _obey(self, order: SyncOrder) -> None:
        match order.order:
            case "stage":
                self._stage(order)
            case "commit":
                if self._staged != order.version:
                    self.errors.append(f"commit of {order.version}, staged is {self._staged}")
                if self.active is not None and order.version < self.active:
                    self.errors.append(f"commit of {order.version} below {self.active}")
                self.active, self.digest, self._staged = order.version, order.digest, None
                self.history.append(order.version)
                self._beat()
                self._ack("active", order.version, order.seq, digest=order.digest)
            case "abort":
                self._staged = None
                self._ack("aborted", order.version, order.seq)

    def _stage(self, order: SyncOrder) -> None:
        manifest = opened(self._place.store.read_manifest(order.version), KEY)
        held = [
            replace(tensor, digest=hashlib.sha256(self._place.store.read(tensor.digest)).hexdigest())
            for tensor in manifest.tensors
        ]
        if not order.canaries:
            self.errors.append(f"stage of {order.version} without canaries")
        self._staged = order.version
        self._ack("staged", order.version, order.seq, digest=order.digest)
        self._ack(
            "verified",
            order.version,
            order.seq,
            digest=manifest.digest(),
            loaded_digest=loaded_digest(held),
            canary_gap=0.0,
        )

    def _ack(self, kind: str, version: VersionId | None, seq: int, **more: object) -> None:
        ack = Ack(
            worker=self.name,
            incarnation=self.incarnation,
            kind=kind,  # type: ignore[arg-type]
            version=version,
            seq=seq,
            **more,  # type: ignore[arg-type]
        )
        sent = self._twist(ack)
        if sent is not None:
            self._place.bus.append(ACKS.at(self._place.job), sent)

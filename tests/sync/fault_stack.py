"""The parts that the fault table runs on: sync's and the workers' own loops around one real Redis and store.

Workers and sync run `main` in threads of this process, so that a fault can be put exactly where a row says; what a row
kills is a process (`fault_process.py`). The trainer is the test: it exports, stamps, scores the canaries and mints, and
a clean version is one that nothing was done to.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from conformance.forge import MODELS
from fault_board import MODEL, Hooks, Kind, Switchboard
from fault_weights import IDS, PROMPT, Tensors, adapter, expected, tensors_of
from safetensors.torch import save_file
from waiting import wait_until

import syncline.rollout.loop as rollout_loop
import syncline.sync.loop as sync_loop
from syncline.contract import events
from syncline.contract.precision import PrecisionContract
from syncline.contract.streams import (
    EVENTS,
    HEARTBEAT,
    JOB,
    LOCK,
    MINTED,
    PHASE,
    PHASES,
    SYNC,
    VERSIONS,
    WORKERS,
)
from syncline.contract.version_path import (
    Canary,
    Minted,
    SyncOrder,
    VersionId,
    VersionRecord,
)
from syncline.rollout.worker import Worker
from syncline.runtime.bus import Bus, pack, unpack
from syncline.runtime.service import ServiceContext
from syncline.runtime.settings import Settings
from syncline.runtime.store import BlobStore

SECONDS = 60.0

Change = Callable[[Tensors], object]
Damage = Callable[[Path], object]


class Stack:
    """One job: workers w0 .. that live through all rows, and what the trainer does."""

    def __init__(self, board: Switchboard, url: str, job: str, runs: Path, kind: Kind) -> None:
        self.kind, self.job, self.run, self.spec = kind, job, runs / job, kind.spec()
        self.contract: PrecisionContract = self.spec.contract()
        self.bus, self.hooks, self.parts = Bus(url), Hooks(), dict[str, Worker]()
        self.gone: set[str] = set()
        self.number = -1  # of the newest version minted
        self.minted: Minted | None = None  # as the trainer said it last
        self.served = -1  # of the version that everybody serves between rows
        self._seeds: dict[int, int] = {}  # version -> seed of its weights, where that is not its number
        self._settings = Settings(redis_url=url, runs=runs, models=MODELS, job=job, port=0)
        self._whole = VersionId(0, 0)  # with an adapter: the newest version that brought the base
        self._contexts: list[ServiceContext] = []
        self._ends: dict[str, Future[None]] = {}
        self._victims: dict[str, subprocess.Popen[bytes]] = {}
        self._sync: subprocess.Popen[bytes] | None = None
        self.run.mkdir(parents=True)
        (self.run / "key").write_bytes(b"a key of this job")
        self.bus.hset(JOB.at(job), "spec", self.spec.canonical())
        if kind.store_kib is not None:
            (self.run / "store").mkdir()
            mounting = [
                "mount",
                "-t",
                "tmpfs",
                "-o",
                f"size={kind.store_kib}k",
                "none",
                str(self.run / "store"),
            ]
            subprocess.run(mounting, check=True)
        self.store = BlobStore(self.run / "store")
        board.stacks[job] = self
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        phase = events.Phase(
            seq=0,
            mode=self.kind.mode,
            phase="sync",
            rollout="awake",
            trainer="awake",
            gate="open",
            update=0,
            at=0.0,
        )
        self.bus.set(PHASE.at(self.job), pack(phase))
        self.bus.append(PHASES.at(self.job), phase)
        for name in self.kind.victims:
            self._victims[name] = self._process("rollout", name)
        for name in self.kind.workers:
            self._thread("rollout", name, rollout_loop.main)
        if self.kind.sync == "thread":
            self._thread("sync", None, sync_loop.main)
        else:
            self.start_sync()
        wait_until(lambda: len(self.parts) == len(self.kind.workers), SECONDS, "workers in threads")
        for name in self.kind.victims:
            wait_until(lambda name=name: self._beats(name), SECONDS, f"process of {name}")  # type: ignore[misc]

    # ---- who runs
    def _thread(self, service: str, worker: str | None, main: Callable[[ServiceContext], None]) -> None:
        settings = msgspec.structs.replace(self._settings, worker=worker)
        context = ServiceContext(service, settings, Bus(settings.redis_url))
        end: Future[None] = Future()

        def live() -> None:
            try:
                main(context)
            except BaseException as error:  # noqa: BLE001 - as the frame of a process
                end.set_exception(error)  # `check_alive` tells of it
            else:
                end.set_result(None)

        context._threads.append(context.thread("heartbeat", context._beat))
        thread = threading.Thread(target=live, name=f"{service}-{worker}", daemon=True)
        thread.start()
        self._contexts.append(context)
        self._ends[worker or service] = end

    def _process(self, service: str, worker: str | None = None) -> subprocess.Popen[bytes]:
        settings = msgspec.structs.replace(self._settings, worker=worker)
        script = str(Path(__file__).with_name("fault_process.py"))
        with (self.run / f"{worker or service}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, script, service], env={**os.environ, **settings.environ()}, stderr=log
            )

    def start_sync(self) -> None:
        self._sync = self._process("sync")

    def kill_sync(self) -> None:
        """kill -9. The lease is dropped too: the next one need not wait ten seconds for it to run out."""
        assert self._sync is not None
        self._sync.kill()
        self._sync.wait(SECONDS)
        self.bus.delete(LOCK.at(f"{self.job}/sync"))

    def kill(self, name: str) -> None:
        """kill -9 a victim. Its heartbeat is dropped too: nobody need wait for it to run out."""
        self._victims[name].kill()
        self._victims[name].wait(SECONDS)
        self.bus.delete(HEARTBEAT.at(f"{self.job}/rollout/{name}"))
        self.gone.add(name)

    def _beats(self, name: str) -> bool:
        return self.bus.get(HEARTBEAT.at(f"{self.job}/rollout/{name}")) is not None

    @contextmanager
    def newcomer(self, name: str) -> Iterator[None]:
        """One more worker, which ends with the block."""
        self._thread("rollout", name, rollout_loop.main)
        try:
            yield
        finally:
            context = self._contexts.pop()
            context.stopping.set()
            assert self._ends.pop(name).exception(SECONDS) is None
            context._ended.set()
            for thread in context._threads:
                thread.join(SECONDS)
            context.bus.close()
            del self.parts[name]

    def check_alive(self) -> None:
        """Nothing but what was killed has ended."""
        for name, end in self._ends.items():
            assert not end.done(), f"{name} ended: {end.exception()}"
        for name, process in self._victims.items():
            assert name in self.gone or process.poll() is None, f"process of {name} ended"
        assert self._sync is None or self._sync.poll() is None, "sync's process ended"

    def close(self) -> None:
        self.hooks = Hooks()
        for context in self._contexts:
            context.stopping.set()
        for process in [*self._victims.values(), *([self._sync] if self._sync else [])]:
            process.kill()
            process.wait(SECONDS)
        for end in self._ends.values():
            end.exception(SECONDS)
        for context in self._contexts:
            context._ended.set()
            for thread in context._threads:
                thread.join(SECONDS)
            context.bus.close()
        self.bus.close()
        if self.kind.store_kib is not None:
            subprocess.run(["umount", "-l", str(self.run / "store")], check=True)

    # ---- the trainer
    def mint(
        self,
        change: Change | None = None,
        *,
        damage: Damage | None = None,
        late: Damage | None = None,
        whole: bool = False,
        base: VersionId | None = None,
        split: Callable[[Tensors], Mapping[str, Tensors]] | None = None,
    ) -> VersionId:
        """Mint the next version.

        change   what is wrong with the tensors before they are written and stamped
        damage   what is done to the folder before it is stamped; `late`: after
        whole    with an adapter: bring the base too, as the first version does
        base     with an adapter: the version named as the base (default: the newest that brought it)
        split    file name -> tensors (default: one file)
        """
        self.number += 1
        version = VersionId(0, self.number)
        tensors = tensors_of(self.contract, self._seed(self.number))
        alone = self.contract.adapter is not None and not whole and self.number > 0
        if alone:
            tensors = adapter(self.contract, self.number)
        elif self.contract.adapter is not None:
            self._whole = version
        if change is not None:
            change(tensors)
        folder = self.run / "export" / str(version)
        folder.mkdir(parents=True)
        for file, part in (split(tensors) if split else {"model.safetensors": tensors}).items():
            save_file({name: tensor.contiguous().clone() for name, tensor in part.items()}, folder / file)
        (folder / "config.json").write_bytes((MODELS / MODEL / "config.json").read_bytes())
        if damage is not None:
            damage(folder)
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        if late is not None:
            late(folder)
        minted = Minted(
            job=self.job,
            version=version,
            parent=None,
            optimizer_step=self.number,
            contract=self.contract.digest(),
            artefact=f"export/{version}",
            files=files,
            canaries=(
                Canary(
                    tokens=IDS,
                    prompt=PROMPT,
                    logprobs=tuple(expected(self.contract, self._seed(self.number))),
                ),
            ),
            traceparent=f"00-{self.number + 1:032x}-{1:016x}-01",
            minted_at=1.0,
            base=(base or self._whole) if alone else None,
        )
        self.minted = minted
        self.bus.append(MINTED.at(self.job), minted)
        return version

    # ---- what can be seen
    @property
    def alive(self) -> list[str]:
        return [name for name in self.kind.names if name not in self.gone]

    def record(self, version: VersionId) -> VersionRecord | None:
        raw = self.bus.hget(VERSIONS.at(self.job), str(version))
        return None if raw is None else msgspec.json.decode(raw, type=VersionRecord)

    def state_of(self, version: VersionId) -> str:
        record = self.record(version)
        return "" if record is None else record.state

    def reason(self, version: VersionId, worker: str | None = None) -> str:
        """Why a version failed, or why a worker did not take it."""
        record = self.record(version)
        if record is None:
            return ""
        if worker is None:
            return record.reason
        return record.workers[worker].reason if worker in record.workers else ""

    def serves(self, name: str) -> int | None:
        """Number of the version that a living worker serves: of a thread, what its engine reads."""
        if name in self.parts:
            serving = self.parts[name].engine.serving
            return None if serving is None else serving[0].number
        raw = self.bus.hget(WORKERS.at(self.job), name)
        version = None if raw is None else unpack(raw, events.WorkerStatus).version
        return None if version is None else version.number

    def scores_as(self, name: str, number: int) -> bool:
        """Whether the worker really computes with that version (known of threads alone)."""
        if name not in self.parts:
            return True
        ours = self.parts[name].engine.score(IDS, PROMPT, buffer="active", kv="wide").logprobs
        worst = max(
            abs(a - b) for a, b in zip(ours, expected(self.contract, self._seed(number)), strict=True)
        )
        return worst <= self.contract.convert.tolerance

    def failures(self) -> dict[VersionId, str]:
        told = (unpack(entry, events.Event) for entry in self.bus.range(EVENTS.at(self.job)))
        return {event.version: event.reason for event in told if isinstance(event, events.SyncFailed)}

    def orders(self) -> list[SyncOrder]:
        return [unpack(entry, SyncOrder) for entry in self.bus.range(SYNC.at(self.job))]

    def settle(self, version: VersionId) -> None:
        """Wait until a version is active on all that live, and see that it is what they compute with."""

        def settled() -> bool:
            self.check_alive()
            everybody = all(self.serves(name) == version.number for name in self.alive)
            return everybody and self.state_of(version) == "active"

        wait_until(settled, SECONDS, f"version {version} active on {', '.join(self.alive)}")
        for name in self.alive:
            assert self.scores_as(name, version.number), f"{name} does not compute with {version}"
        self.served = version.number

    def repeat(self) -> None:
        """The next version will have the very weights of the newest one."""
        self._seeds[self.number + 1] = self._seed(self.number)

    def _seed(self, number: int) -> int:
        return self._seeds.get(number, number)

    # ---- stopping somebody at a place
    def hold_process(self, who: str, place: str) -> None:
        """Let the process of `who` stop for ever at `place` (see `fault_process.py`)."""
        (self.run / f"hold.{who}").write_text(place)

    def held_process(self, who: str) -> None:
        """Wait until it stands there; another process of that name is not stopped."""
        held = self.run / f"held.{who}"
        wait_until(held.exists, SECONDS, f"{who} stops where it was told to")
        held.unlink()
        (self.run / f"hold.{who}").unlink()

    @contextmanager
    def held_before_stage(self, *names: str) -> Iterator[Callable[[], None]]:
        """Workers that stand before the load of a version until the block ends. Call it to wait for them."""
        gate, inside = threading.Event(), {name: threading.Event() for name in names}

        def stop(name: str) -> None:
            inside[name].set()
            assert gate.wait(SECONDS), f"{name} was never let go"

        def wait() -> None:
            for name, event in inside.items():
                assert event.wait(SECONDS), f"{name} stages nothing"

        self.hooks.before_stage = {name: lambda name=name: stop(name) for name in names}  # type: ignore[misc]
        try:
            yield wait
        finally:
            self.hooks.before_stage = {}
            gate.set()

    @contextmanager
    def deaf_to_commits(self) -> Iterator[None]:
        """Workers in threads hear no order to commit before the block ends; then they obey it."""
        gate = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            for worker in self.parts.values():
                take = worker.orders._take_commit
                patch.setattr(
                    worker.orders, "_take_commit", lambda order, take=take: gate.wait(SECONDS) and take(order)
                )
            try:
                yield
            finally:
                gate.set()

    @contextmanager
    def failing_reads(self, name: str, tensor: str) -> Iterator[None]:
        """The system refuses to read the blob of `tensor` of the next version, on one worker alone."""
        store, broken = self.parts[name].orders._pulling.store, set[str]()
        descriptor = store.descriptor

        def failing(digest: str) -> int:
            if digest in broken:
                raise OSError(5, "Input/output error")
            return descriptor(digest)

        self.hooks.after_publish = lambda m: broken.update(t.digest for t in m.tensors if t.name == tensor)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "descriptor", failing)
            yield
        self.hooks.after_publish = None

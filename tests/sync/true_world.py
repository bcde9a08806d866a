"""A job in one thread: sync's own `Control`, workers' own `Orders` and reference engines, a real Redis and store.

Nothing runs by itself: a history says whose turn it is, so that it can be told again from its seed. What stands in for
the rest of a worker is `Seat`: it reads orders, sleeps and wakes, decodes, and folds chunks into spans. Its staging
thread is a queue that the history works off. The clock is the history's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import true_weights
from numpy.typing import NDArray
from true_seat import KEY, AtOnce, Seat

from syncline.contract import events
from syncline.contract.job import JobSpec
from syncline.contract.recipes import RECIPES
from syncline.contract.streams import HEARTBEAT, JOB, LOCK, MINTED, PHASE
from syncline.contract.version_path import Canary, Minted, VersionId, opened
from syncline.rollout.engine import CommitPolicy
from syncline.rollout.spans import Sampled
from syncline.runtime.bus import Bus, pack
from syncline.runtime.lease import Lease
from syncline.runtime.service import ServiceContext
from syncline.runtime.settings import Settings
from syncline.runtime.store import BlobStore
from syncline.sync import loop as sync_loop
from syncline.sync.control import Control

WAIT = 60.0  # limits.activation_wait
CANARY = (3, 0, 11, 22, 33, 44, 55, 66, 77, 88, 99)


class Killed(BaseException):
    """Sync's process ends here."""


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.at = 0.0
        self.time = time.time

    def monotonic(self) -> float:
        return self.at


class Fuse:
    """Kills sync at the n-th of the places where it changes something outside itself, before or after the change."""

    def __init__(self) -> None:
        self.left: int | None = None

    def set_in(self, owner: Any, *methods: str) -> None:
        for name in methods:
            setattr(owner, name, partial(self._around, getattr(owner, name)))

    def _around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._burn()
        done = call(*args, **kwargs)
        self._burn()
        return done

    def _burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed


class SyncContext(ServiceContext):
    """What sync's process gets; its lease needs no thread, as no history lasts as long."""

    fuse: Fuse

    def lease(self, name: str) -> Any:
        lock = Lease(self.bus, f"{self.job}/{name}", self.incarnation, seconds=3600.0)
        assert lock.try_acquire()
        self.fuse.set_in(lock, "transact")
        return lock


class World:
    """The job, sync, and its seats."""

    def __init__(self, url: str, job: str, runs: Path, models: Path, clock: Clock, mode: events.Mode) -> None:
        self.bus, self.job, self.run, self.models, self.clock = Bus(url), job, runs / job, models, clock
        self.seats: dict[str, Seat] = {}
        self.count = 0  # of incarnations
        self.serials: dict[VersionId, int] = {}
        self.digests: dict[VersionId, str] = {}
        self.newest: Minted | None = None
        self.tokens = self.spans = self.carried = self.kills = self.refusals = 0
        self.mode, self.awake = mode, True
        self.fuse = Fuse()
        self.control: Control | None = None
        self._phase = -1
        self.run.mkdir(parents=True)
        (self.run / "key").write_bytes(KEY)
        self.spec = JobSpec.model_validate(
            {
                "name": "true-histories",
                "model": {"name": true_weights.MODEL},
                "schedule": {"mode": mode},
                "retention": {"versions": 2},
                "limits": {"activation_wait": WAIT},
            }
        )
        self.bus.hset(JOB.at(job), "spec", self.spec.canonical())
        self._settings = Settings(redis_url=url, runs=runs, models=models, job=job, port=0)
        self.want(mode, awake=True)

    def close(self) -> None:
        for name in list(self.seats):
            self._leave(name)
        keys = self.bus.call("KEYS", f"*{self.job}*")
        if keys:
            self.bus.call("DEL", *keys)
        self.bus.close()
        shutil.rmtree(self.run)

    def heartbeat(self, name: str) -> str:
        return HEARTBEAT.at(f"{self.job}/rollout/{name}")

    # ---- the scheduler
    def want(self, mode: events.Mode, awake: bool) -> None:
        self._phase += 1
        self.mode, self.awake = mode, awake
        phase = events.Phase(
            seq=self._phase,
            mode=mode,
            phase="flow" if mode == "disjoint" else "sample",
            rollout="awake" if awake else "asleep",
            trainer="awake",
            gate="open",
            update=0,
            at=0.0,
        )
        self.bus.set(PHASE.at(self.job), pack(phase))

    def add(self, name: str, policy: CommitPolicy) -> None:
        """A new process, or another in the place of the one that had the name."""
        self._leave(name)
        self.seats[name] = Seat(self, name, policy)

    def _leave(self, name: str) -> None:
        if name in self.seats:
            self.refusals += self.seats.pop(name).mouth.refusals

    def remove(self, name: str) -> None:
        self._leave(name)
        self.bus.delete(self.heartbeat(name))

    # ---- the trainer
    def mint(self, version: VersionId, serial: int, *, canary: bool, damaged: bool) -> None:
        self.serials[version] = serial
        artefact = f"export/{version}"
        files = true_weights.export(self.run / artefact, serial)
        if damaged:
            flip(self.run / artefact / "model.safetensors", -3)
        scores: NDArray[np.float64] = true_weights.logprobs(serial, (serial,))
        made = Canary(tokens=CANARY, prompt=1, logprobs=tuple(float(scores[token]) for token in CANARY[1:]))
        self.newest = Minted(
            job=self.job,
            version=version,
            parent=None,
            optimizer_step=version.number,
            contract=RECIPES["bf16"].digest(),
            artefact=artefact,
            files=files,
            canaries=(made,) if canary else (),
            traceparent=f"00-{len(self.serials):032x}-{1:016x}-01",
            minted_at=1.0,
        )
        self.bus.append(MINTED.at(self.job), self.newest)

    # ---- sync
    def sync_turn(self) -> None:
        """Once through sync's loop; where the fuse ends the process, the next turn starts another."""
        try:
            if self.control is None:
                self._start_sync()
            control = self.control
            assert control is not None
            control.follow_phase()
            control.take_acks()
            control.look()
            control.take_minted()
            control.publish()
            control.take_compared()
            control.retire()
        except Killed:
            self.kills += 1
            self.control = None
        self._note_manifests()

    def _start_sync(self) -> None:
        self.bus.delete(LOCK.at(f"{self.job}/sync"))
        context = SyncContext("sync", self._settings, self.bus)
        context.fuse = self.fuse
        self.control = sync_loop.start(context)
        self.fuse.set_in(self.control._publisher.store, "add", "write_manifest", "collect")
        self.fuse.set_in(self.control._publisher, "drop_export")

    def _note_manifests(self) -> None:
        store = BlobStore(self.run / "store")
        for version in (
            store.manifests() if self.control is None else set(store.manifests()) - self.digests.keys()
        ):
            digest = opened(store.read_manifest(version), KEY).digest()
            assert self.digests.setdefault(version, digest) == digest, f"{version} has two manifests"

    def damage_blob(self, index: int) -> None:
        """One bit of a blob of the newest manifest."""
        store = BlobStore(self.run / "store")
        found = store.manifests()
        if found:
            entries = opened(store.read_manifest(found[-1]), KEY).tensors
            path = store.path(entries[index % len(entries)].digest)
            if path.is_file():
                flip(path, path.stat().st_size // 2)

    # ---- the model that all this is held against
    def judge(self, seat: Seat, prompt: tuple[int, ...], sampled: Sampled) -> None:
        """Every token must be what its span's version samples, from the context that the spans tell of."""
        worker, policy = seat.name, seat.policy
        if policy.kind != "in_place":
            assert len(sampled.spans) == 1, f"{worker}: two versions in one trajectory under {policy}"
        makers: list[VersionId] = []  # version that made the context at each position
        edge = len(prompt)
        for number, span in enumerate(sampled.spans):
            version, where = span.version, f"{worker} token {span.start}: span {span}"
            assert span.worker == worker, where
            assert span.carried_age <= (policy.carried_age if policy.kv == "carried" else 0), where
            assert span.digest == self.digests[version], where
            oldest = VersionId(version.epoch, version.number - span.carried_age)
            if number == 0 or span.context == "recomputed":
                assert span.carried_age == 0, where
                makers = [version] * max(edge, edge + span.start - 1)
            else:  # older positions were made anew by a version that sampled nothing
                makers = [max(maker, oldest) for maker in makers]
                assert min(makers) == oldest, f"{where}: the oldest context is of {min(makers)}"
            for at in range(span.start, span.end):
                if at:
                    makers.append(version)
                self._judge_token(where, version, makers, sampled.tokens[at], sampled.logprobs[at])
            self.spans += 1
            self.carried += span.context == "carried"

    def _judge_token(
        self, where: str, version: VersionId, makers: list[VersionId], token: int, logprob: float
    ) -> None:
        serial = self.serials[version]
        context = [self.serials[maker] for maker in makers]
        said = f"norm of {token // 10}, head of {token % 10} (mod 10)"
        assert token == true_weights.token(serial), (
            f"{where}: sampled by {said}, {version} has serial {serial}"
        )
        expected = true_weights.logprobs(serial, context)[token]
        assert abs(logprob - expected) < 1e-4, (
            f"{where}: log-prob {logprob}, with context {context} {expected}"
        )
        self.tokens += 1


@contextmanager
def clock_of_histories() -> Iterator[Clock]:
    """The clock of sync's and the workers' parts while the block runs."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncline.sync.control.time", clock)
        patch.setattr("syncline.rollout.orders.time", clock)
        patch.setattr("syncline.sync.deltas.ThreadPoolExecutor", AtOnce)
        yield clock


def flip(path: Path, at: int) -> None:
    """One bit, in place."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x40
    path.chmod(0o644)
    path.write_bytes(raw)

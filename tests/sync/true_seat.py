"""One rollout worker's process in a history: real orders and a real reference engine, and no time of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import true_weights

from syncline.contract import events
from syncline.contract.job import ModelSpec
from syncline.contract.streams import SYNC, WORKERS
from syncline.contract.version_path import SyncOrder, VersionId
from syncline.rollout.engine import Chunk, CommitPolicy, Request, Sampling
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.orders import Orders
from syncline.rollout.spans import fold
from syncline.runtime.bus import Bus, pack, unpack
from syncline.runtime.store import BlobStore, MissingManifest
from syncline.transport.files import SharedFiles

if TYPE_CHECKING:
    from true_world import World

KEY = b"a key of this job"
ROOM = 4  # requests of one seat


class Deferred(Future[Any]):
    """Work of the staging thread that is done when the history says, or when somebody must have it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def carry_out(self) -> None:
        if not self.done():
            try:
                self.set_result(self._work())
            except Exception as error:  # noqa: BLE001 - as an executor does
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.carry_out()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> Any:
        self.carry_out()
        return super().exception(timeout)


class AtOnce:
    """An executor that needs no thread: work is done when it is given."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        """As an executor is made."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Deferred:
        done = Deferred(partial(work, *args))
        done.carry_out()
        return done

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Nothing is under way."""


class Hands:
    """The staging thread of a seat."""

    def __init__(self) -> None:
        self.queue: list[Deferred] = []

    def submit(self, work: Callable[..., Any], *args: Any) -> Deferred:
        self.queue.append(Deferred(partial(work, *args)))
        return self.queue[-1]

    def finish(self) -> None:
        for work in self.queue:
            work.carry_out()
        self.queue.clear()

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        self.queue.clear()


class Mouth:
    """What a worker's answers go through: sent, lost, or held back."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.fate: Literal["send", "drop", "hold"] = "send"
        self.held: list[tuple[str, Any]] = []
        self.said: list[tuple[str, Any]] = []
        self.refusals = 0

    def append(self, key: str, message: Any) -> str:
        self.said.append((key, message))
        self.refusals += message.kind == "failed"
        if self.fate == "hold":
            self.held.append((key, message))
        return self._bus.append(key, message) if self.fate == "send" else "0-0"

    def release(self) -> None:
        for key, message in self.held:
            self._bus.append(key, message)
        self.held.clear()

    def repeat(self, index: int) -> None:
        """An old answer comes once more."""
        if self.said:
            key, message = self.said[-1 - index % len(self.said)]
            if message.kind != "joined":
                self._bus.append(key, message)


class Seat:
    """One worker's process."""

    def __init__(self, world: World, name: str, policy: CommitPolicy) -> None:
        world.count += 1
        self.world, self.name, self.incarnation = world, name, f"i{world.count}"
        self.engine = ReferenceEngine(world.models, ModelSpec(name=true_weights.MODEL), world.job, KEY, ROOM)
        self.store = BlobStore(world.run / "store")
        self.mouth, self.hands = Mouth(world.bus), Hands()
        mouth: Any = self.mouth
        pulling = SharedFiles(self.store, KEY)
        self.orders = Orders(
            mouth, self.engine, pulling, world.job, name, self.incarnation, policy, lambda: None
        )
        self.orders.close()
        hands: Any = self.hands
        self.orders._thread = hands
        self.awake, self.policy = False, policy
        self._cursor = world.bus.last_id(SYNC.at(world.job))
        self._highest: VersionId | None = None
        self._told: tuple[VersionId, str] | None = None
        self._asked = 0
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._chunks: dict[str, list[Chunk]] = {}
        self._lie: int | None = None
        reading: Any = self.store
        reading.read, reading.mapped = partial(self._read, reading.read), partial(self._read, reading.mapped)
        reading.descriptor = partial(self._open, reading.descriptor)
        self.beat()
        self.tell()

    def turn(self, steps: int = 1) -> None:
        """Once through the worker's loop, with so many decode steps."""
        read = self.world.bus.read({SYNC.at(self.world.job): self._cursor}, None)
        for entry in read.get(SYNC.at(self.world.job), []):
            self._cursor = entry.id
            self.orders.take(unpack(entry, SyncOrder))
        self._obey()
        self.orders.advance(self.awake)
        self.orders.join(self.awake)
        self._never_falls()
        for _ in range(steps if self.engine.running else 0):
            for chunk in self.engine.step():
                self._chunks.setdefault(chunk.trajectory, []).append(chunk)
                if chunk.finish is not None:
                    self._ended(chunk.trajectory)
        if self.engine.serving != self._told:
            self._told = self.engine.serving
            self.tell()

    def ask(self, prompt: tuple[int, ...], tokens: int) -> None:
        """One more request, if the loop would begin one now."""
        if self.engine.serving is None or self.engine.room < 1 or not self.awake or not self.world.awake:
            return
        self._asked += 1
        name = f"{self.name}-{self.incarnation}-{self._asked}"
        sampling = Sampling(max_tokens=tokens, min_tokens=tokens, top_k=1)
        self._prompts[name] = prompt
        self.engine.submit(Request(trajectory=name, prompt=prompt, seed=(self._asked,), sampling=sampling))

    def _ended(self, trajectory: str) -> None:
        self.world.judge(self, self._prompts.pop(trajectory), fold(self._chunks.pop(trajectory), self.name))

    def _obey(self) -> None:
        if self.world.awake and not self.awake:
            self.awake = True
            try:
                self.engine.wake(self.store)
            except (ValueError, MissingManifest, OSError):
                return  # it asks sync
        if not self.world.awake and self.awake and not self.engine.running:
            self.orders.forget()
            self.engine.sleep()
            self.awake = False

    def _never_falls(self) -> None:
        if self.engine.serving is not None:
            version = self.engine.serving[0]
            assert self._highest is None or version >= self._highest, (
                f"{self.name}: {version} after {self._highest}"
            )
            self._highest = version

    def tell(self) -> None:
        """What a worker says of itself twice a second."""
        serving = self.engine.serving
        status = events.WorkerStatus(
            worker=self.name,
            incarnation=self.incarnation,
            state="serving" if serving else "empty",
            version=serving[0] if serving else None,
            digest=serving[1] if serving else "",
            staged=self.engine.staged,
            running=self.engine.running,
            waiting=0,
            tokens=self.engine.sampled,
            tokens_per_second=0.0,
            device="",
            resident=0,
            why="",
            at=0.0,
        )
        self.world.bus.hset(WORKERS.at(self.world.job), self.name, pack(status))

    def beat(self) -> None:
        beat = events.Heartbeat(
            service="rollout",
            name=self.name,
            incarnation=self.incarnation,
            pid=os.getpid(),
            port=None,
            ready=True,
            why="",
            at=0.0,
        )
        self.world.bus.set(self.world.heartbeat(self.name), pack(beat))

    def lie(self, reads: int) -> None:
        """One bit of the blob that is read after so many others comes out wrong, here alone."""
        self._lie = reads

    def _read(self, read: Callable[[str], memoryview], digest: str) -> memoryview:
        raw = read(digest)
        return memoryview(_wrong(raw)) if self._lies(raw.nbytes) else raw

    def _open(self, opened: Callable[[str], int], digest: str) -> int:
        blob = opened(digest)
        if not self._lies(os.fstat(blob).st_size):
            return blob
        wrong = _wrong(os.pread(blob, os.fstat(blob).st_size, 0))
        os.close(blob)
        other = os.memfd_create("wrong")
        os.write(other, wrong)
        os.lseek(other, 0, os.SEEK_SET)
        return other

    def _lies(self, nbytes: int) -> bool:
        """Whether this read is the one that comes out wrong."""
        if self._lie is None or not nbytes:
            return False
        self._lie -= 1
        if self._lie >= 0:
            return False
        self._lie = None
        return True


def _wrong(raw: bytes | memoryview) -> bytearray:
    wrong = bytearray(raw)
    wrong[len(wrong) // 2] ^= 0x40
    return wrong

"""A worker pulls by deltas over real HTTP: it catches up by a chain, and any fault costs bytes and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from waiting import wait_until

from syncline.contract.deltas import DeltaEntry, DeltaIndex, SignedIndex, opened_index, sign_index
from syncline.contract.pulled import Pulled
from syncline.contract.version_path import SyncOrder, TensorEntry, VersionId, VersionManifest, sign
from syncline.runtime.delta import encode
from syncline.runtime.store import BlobStore
from syncline.sync.deltas import Deltas
from syncline.transport.catchup import LINKS
from syncline.transport.http import HttpFetch, HttpOffering
from syncline.transport.puller import Puller

KEY = b"k" * 32
JOB = "j0123456789"
BIG = 100_000  # bytes of a tensor


def bf16(seed: int) -> bytes:
    values = np.random.default_rng(seed).normal(0, 0.02, BIG // 2).astype("<f4")
    return bytes((values.view("<u4") >> 16).astype("<u2").data)


def stepped(old: bytes, every: int) -> bytes:
    words = np.frombuffer(old, "<u2").copy()
    words[::every] += 1
    return bytes(words.data)


class World:
    """Sync's store with its deltas, offered over HTTP, and a worker's folder."""

    def __init__(self, folder: Path) -> None:
        self.store = BlobStore(folder / "job")
        self.own = folder / "w0"
        self.deltas = Deltas(self.store, JOB, KEY, wanted=True)
        self.offering = HttpOffering(self.store, KEY, "127.0.0.1")
        self.worker = self.restarted()
        self.parts: dict[str, bytes] = {"a": bf16(0), "b": bf16(1)}
        self.number = -1
        self.digest = ""

    def restarted(self) -> Puller:
        self.own.mkdir(exist_ok=True)
        self.worker = Puller(HttpFetch(KEY, 1 << 20), self.own, KEY, "w0", 30.0, 0.3)
        return self.worker

    def publish(self, *, index: bool = True) -> None:
        """The next version: one element in 50 moves."""
        self.number += 1
        self.parts = {name: stepped(raw, 50 + self.number) for name, raw in self.parts.items()}
        manifest = VersionManifest(
            job=JOB,
            version=VersionId(0, self.number),
            parent=None,
            optimizer_step=self.number,
            contract="c",
            representation="bf16",
            model="m",
            tensors=tuple(
                TensorEntry(name=n, dtype="BF16", shape=(BIG // 2,), nbytes=BIG, digest=self.store.put(raw))
                for n, raw in self.parts.items()
            ),
        )
        self.digest = manifest.digest()
        self.store.write_manifest(sign(manifest, KEY))
        if index:
            self.deltas.start(manifest)
            wait_until(self.deltas.done, 30, "deltas")

    def pull(self, serving: int | None) -> Pulled:
        order = SyncOrder(
            order="stage",
            version=VersionId(0, self.number),
            digest=self.digest,
            workers=("w0",),
            seq=self.number,
            source=self.offering.source(VersionId(0, self.number), ("w0",), self.number),
        )
        version = None if serving is None else VersionId(0, serving)
        signed, pulled = self.worker.pull(order, version)
        for entry in msgspec.json.decode(signed.manifest, type=VersionManifest).tensors:
            assert bytes(self.worker.store.read(entry.digest)) == self.parts[entry.name]
        return pulled

    def index(self, number: int) -> DeltaIndex:
        signed = self.store.read_index(VersionId(0, number))
        assert signed is not None
        return opened_index(signed, KEY, JOB, VersionId(0, number))

    def rewrite(self, number: int, signed: SignedIndex) -> None:
        path = self.store.index_path(VersionId(0, number))
        path.unlink()
        path.write_bytes(msgspec.json.encode(signed))

    def altered(self, number: int, change: Callable[[DeltaEntry], DeltaEntry]) -> None:
        index = self.index(number)
        entries = tuple(change(entry) for entry in index.deltas)
        self.rewrite(number, sign_index(msgspec.structs.replace(index, deltas=entries), KEY))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.worker.close()
    world.offering.close()
    world.deltas.close()


def test_a_worker_that_was_down_for_two_versions_catches_up_by_a_chain(world: World) -> None:
    world.publish()
    first = world.pull(None)
    assert (first.full, first.deltas, first.fallbacks) == (2 * BIG, 0, {})
    for _ in range(3):
        world.publish()
    world.worker.close()
    world.restarted()
    pulled = world.pull(None)
    assert (pulled.full, pulled.fallbacks) == (0, {})
    named = [entry.nbytes for number in (1, 2, 3) for entry in world.index(number).deltas]
    assert pulled.deltas == sum(named) < BIG // 2


def test_a_chain_that_is_too_long_or_broken_comes_whole(world: World) -> None:
    world.publish()
    world.pull(None)
    for _ in range(LINKS + 1):
        world.publish()
    assert world.pull(0).fallbacks == {"no base held": 2}  # indexes further back are not read
    base = world.number
    for _ in range(3):
        world.publish()
    world.store.collect({VersionId(0, world.number), VersionId(0, world.number - 1)})
    pulled = world.pull(base)
    assert pulled.fallbacks == {"no index": 2}  # further behind than retention
    assert pulled.full == 2 * BIG


def test_a_new_worker_takes_whole_tensors_and_waits_for_no_index(world: World) -> None:
    world.publish()
    world.publish(index=False)
    pulled = world.pull(None)
    assert (pulled.full, pulled.deltas, pulled.fallbacks) == (2 * BIG, 0, {})


def missing_index(world: World) -> None:
    world.store.index_path(VersionId(0, 1)).unlink()


def foreign_index(world: World) -> None:
    index = msgspec.structs.replace(world.index(1), job="j9999999999")
    world.rewrite(1, sign_index(index, KEY))


def altered_signature(world: World) -> None:
    world.rewrite(1, sign_index(world.index(1), b"another key"))


def index_of_another_manifest(world: World) -> None:
    world.rewrite(1, sign_index(msgspec.structs.replace(world.index(1), manifest="0" * 64), KEY))


def damage(world: World, change: Callable[[bytes], bytes]) -> None:
    for entry in world.index(1).deltas:
        path = world.store.path(entry.blob)
        raw = path.read_bytes()
        path.unlink()
        path.write_bytes(change(raw))


def missing_delta(world: World) -> None:
    for entry in world.index(1).deltas:
        world.store.path(entry.blob).unlink()


def truncated_delta(world: World) -> None:
    damage(world, lambda raw: raw[:-1])


def flipped_delta(world: World) -> None:
    damage(world, lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]))


def garbage_under_its_own_digest(world: World) -> None:
    blob = world.store.put(b"no delta")
    world.altered(1, lambda e: msgspec.structs.replace(e, blob=blob, nbytes=8))


def delta_of_another_base(world: World) -> None:
    a, b = world.parts["a"], bf16(9)
    made = encode(b, a, 2)
    assert made is not None
    blob = world.store.put(made.data)
    world.altered(1, lambda e: msgspec.structs.replace(e, blob=blob, nbytes=len(made.data)))


def base_that_is_not_held(world: World) -> None:
    world.altered(1, lambda e: msgspec.structs.replace(e, old="f" * 64))


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (missing_index, "no index"),
        (foreign_index, "bad index"),
        (altered_signature, "bad index"),
        (index_of_another_manifest, "bad index"),
        (missing_delta, "no delta"),
        (truncated_delta, "damaged delta"),
        (flipped_delta, "damaged delta"),
        (garbage_under_its_own_digest, "bad delta"),
        (delta_of_another_base, "other base"),
        (base_that_is_not_held, "no base held"),
    ],
)
def test_a_fault_is_counted_and_the_tensor_comes_whole_in_the_same_call(
    world: World, caplog: pytest.LogCaptureFixture, fault: Callable[[World], None], cause: str
) -> None:
    world.publish()
    world.pull(None)
    world.publish()
    fault(world)
    pulled = world.pull(0)
    assert pulled.fallbacks == {cause: 2}
    assert pulled.full == 2 * BIG
    for name in "ab":
        assert any(f"tensor {name} " in line and cause in line for line in caplog.messages)
    world.publish()  # the next clean one goes by deltas again
    again = world.pull(1)
    assert (again.full, again.fallbacks) == (0, {})


def test_a_damaged_base_on_the_worker_is_found(world: World) -> None:
    world.publish()
    world.pull(None)
    path = world.worker.store.path(world.worker.store.put(world.parts["a"]))
    path.chmod(0o600)
    path.write_bytes(bytes(BIG))
    world.publish()
    pulled = world.pull(0)
    assert pulled.fallbacks == {"other base": 1}
    assert pulled.full == BIG

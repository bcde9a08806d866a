"""Making deltas: every entry makes the tensor it names, none is larger, and no fault costs more than the deltas."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from waiting import wait_until

from syncline.contract.deltas import (
    BadIndex,
    DeltaEntry,
    DeltaIndex,
    SignedIndex,
    decoded_index,
    opened_index,
    sign_index,
)
from syncline.contract.version_path import TensorEntry, VersionId, VersionManifest, sign
from syncline.runtime.delta import apply
from syncline.runtime.store import BlobStore, MissingBlob, MissingManifest
from syncline.sync.deltas import Compared, Deltas

KEY = b"k" * 32
JOB = "j0123456789"
BIG = 200_000  # bytes of a tensor that is worth a delta


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "store")


@pytest.fixture
def deltas(store: BlobStore) -> Iterator[Deltas]:
    made = Deltas(store, JOB, KEY, wanted=True)
    yield made
    made.close()


def bf16(seed: int, nbytes: int = BIG) -> bytes:
    values = np.random.default_rng(seed).normal(0, 0.02, nbytes // 2).astype("<f4")
    return bytes((values.view("<u4") >> 16).astype("<u2").data)


def stepped(old: bytes, every: int) -> bytes:
    """`old` with each `every`-th BF16 value one up."""
    words = np.frombuffer(old, "<u2").copy()
    words[::every] += 1
    return bytes(words.data)


def publish(store: BlobStore, number: int, parts: dict[str, bytes], dtype: str = "BF16") -> VersionManifest:
    manifest = VersionManifest(
        job=JOB,
        version=VersionId(0, number),
        parent=VersionId(0, number - 1) if number else None,
        optimizer_step=number,
        contract="c",
        representation="bf16",
        model="m",
        tensors=tuple(
            TensorEntry(name=name, dtype=dtype, shape=(len(raw),), nbytes=len(raw), digest=store.put(raw))
            for name, raw in sorted(parts.items())
        ),
    )
    store.write_manifest(sign(manifest, KEY))
    return manifest


def compared(deltas: Deltas, manifest: VersionManifest) -> Compared:
    deltas.start(manifest)
    (found,) = wait_until(deltas.done, 30, "the comparison's end")
    return found


def index_of(store: BlobStore, number: int) -> DeltaIndex:
    signed = store.read_index(VersionId(0, number))
    assert signed is not None
    return opened_index(signed, KEY, JOB, VersionId(0, number))


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file grows beyond `room` bytes: what a full disk does to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- what is made
def test_each_entry_makes_its_tensor_and_is_smaller(store: BlobStore, deltas: Deltas) -> None:
    small, noise = bf16(1), np.random.default_rng(2).bytes(BIG)
    before = {"same": bf16(0), "small": small, "noise": noise, "grown": bf16(3), "gone": bf16(4)}
    after = {
        "same": before["same"],
        "small": stepped(small, 50),
        "noise": np.random.default_rng(5).bytes(BIG),  # no delta is smaller
        "grown": bf16(3, BIG + 2),
        "new": bf16(6),
        "moved": before["gone"],  # content that is held already
    }
    assert compared(deltas, publish(store, 0, before)).indexed
    manifest = publish(store, 1, after)
    found = compared(deltas, manifest)
    index = index_of(store, 1)
    assert (index.manifest, index.before) == (manifest.digest(), VersionId(0, 0))
    names = {tensor.digest: tensor.name for tensor in manifest.tensors}
    assert [names[entry.new] for entry in index.deltas] == ["small"]
    (entry,) = index.deltas
    data = store.read(entry.blob)
    assert len(data) == entry.nbytes < len(small) // 20
    assert apply(store.read(entry.old), data) == after["small"]
    lacking = 4 * BIG + 2
    assert found == Compared(
        version=VersionId(0, 1),
        before=VersionId(0, 0),
        changed_bytes=lacking,
        changed_share=found.changed_share,
        delta_bytes=lacking - BIG + entry.nbytes,
        indexed=True,
    )
    elements = sum(len(raw) // 2 for raw in after.values())
    moved = np.count_nonzero(np.frombuffer(noise, "<u2") != np.frombuffer(after["noise"], "<u2"))
    changed = BIG // 2 // 50 + int(moved) + (BIG + 2) // 2 + 2 * (BIG // 2)
    assert found.changed_share == pytest.approx(changed / elements, rel=1e-9)


def test_a_version_without_changes_and_a_first_one_have_empty_indexes(
    store: BlobStore, deltas: Deltas
) -> None:
    first = compared(deltas, publish(store, 0, {"w": bf16(0)}))
    assert first == Compared(version=VersionId(0, 0), before=None, indexed=True)
    second = compared(deltas, publish(store, 1, {"w": bf16(0)}))
    assert (second.changed_bytes, second.changed_share, second.delta_bytes) == (0, 0.0, 0)
    assert index_of(store, 0).deltas == index_of(store, 1).deltas == ()


def test_where_no_deltas_are_wanted_changes_are_counted_alone(store: BlobStore) -> None:
    deltas = Deltas(store, JOB, KEY, wanted=False)
    publish(store, 0, {"w": bf16(0)})
    found = compared(deltas, publish(store, 1, {"w": stepped(bf16(0), 100)}))
    deltas.close()
    assert (found.changed_bytes, found.changed_share) == (BIG, 0.01)
    assert found.delta_bytes is None
    assert not found.indexed
    assert store.read_index(VersionId(0, 1)) is None


def test_a_newer_version_ends_the_work_on_an_older_one(store: BlobStore, deltas: Deltas) -> None:
    """The older one's index may name what was made by then; the newer one's is whole."""
    old = {f"w{at}": bf16(at) for at in range(6)}
    new = {name: stepped(raw, 50) for name, raw in old.items()}
    newest = {name: stepped(raw, 70) for name, raw in new.items()}
    for number, parts in enumerate((old, new, newest)):
        deltas.start(publish(store, number, parts))
    found: list[Compared] = []

    def all_three() -> bool:
        found.extend(deltas.done())
        return len(found) == 3

    wait_until(all_three, 60, "all three comparisons")
    assert [c.version.number for c in found] == [0, 1, 2]
    assert found[2].changed_share is not None
    assert len(index_of(store, 2).deltas) == 6
    for entry in (*index_of(store, 1).deltas, *index_of(store, 2).deltas):
        assert apply(store.read(entry.old), store.read(entry.blob)) == store.read(entry.new)


# ---- what goes wrong
def test_a_full_disk_costs_the_deltas_and_names_the_tensor(store: BlobStore, deltas: Deltas) -> None:
    publish(store, 0, {"layer.w": bf16(0)})
    manifest = publish(store, 1, {"layer.w": stepped(bf16(0), 50)})
    with full_disk(500):
        found = compared(deltas, manifest)
    assert found.problems == ("tensor layer.w: File too large",)
    assert found.changed_bytes == BIG
    assert (found.indexed, found.delta_bytes, found.changed_share) == (False, None, None)
    assert store.read_index(VersionId(0, 1)) is None
    assert not list(store.path("0" * 64).parent.glob("*.tmp"))
    assert compared(deltas, manifest).indexed  # with room again


def test_a_damaged_or_collected_base_costs_its_tensor_a_delta(store: BlobStore, deltas: Deltas) -> None:
    before = publish(store, 0, {"a": bf16(0), "b": bf16(1), "c": bf16(2)})
    after = publish(store, 1, {name: stepped(bf16(at), 50) for at, name in enumerate("abc")})
    gone, short, _ = (store.path(tensor.digest) for tensor in before.tensors)
    gone.unlink()
    short.chmod(0o600)
    short.write_bytes(b"short")
    found = compared(deltas, after)
    assert [problem.split(":")[0] for problem in found.problems] == ["tensor a", "tensor b"]
    assert [entry.new for entry in index_of(store, 1).deltas] == [after.tensors[2].digest]
    assert found.changed_share is None  # not every pair was compared
    assert found.delta_bytes is not None
    assert 2 * BIG < found.delta_bytes < 3 * BIG


def test_a_version_whose_forerunner_is_forged_has_an_empty_index(store: BlobStore, deltas: Deltas) -> None:
    forged = publish(store, 0, {"w": bf16(0)})
    path = store.path("0" * 64).parent.parent / "manifests" / "0.0.json"
    path.unlink()
    store.write_manifest(sign(forged, b"another key"))
    found = compared(deltas, publish(store, 1, {"w": stepped(bf16(0), 50)}))
    assert "signature" in found.problems[0]
    assert index_of(store, 1).deltas == ()
    assert index_of(store, 1).before is None


# ---- the index and its retention
def test_an_index_is_of_one_version_of_one_job_and_signed() -> None:
    index = DeltaIndex(job=JOB, version=VersionId(0, 7), manifest="m", before=None)
    signed = sign_index(index, KEY)
    assert opened_index(signed, KEY, JOB, VersionId(0, 7)) == index
    altered = SignedIndex(index=signed.index.replace(b'"m"', b'"n"'), mac=signed.mac)
    for bad, job, number in (
        (signed, "j9999999999", 7),
        (signed, JOB, 8),
        (altered, JOB, 7),
        (sign_index(index, b"another"), JOB, 7),
    ):
        with pytest.raises(BadIndex):
            opened_index(bad, KEY, job, VersionId(0, number))
    with pytest.raises(BadIndex):
        decoded_index(b"{")


def test_a_signed_manifest_passes_for_no_index(store: BlobStore) -> None:
    manifest = publish(store, 7, {"w": b"ww"})
    signed = sign(manifest, KEY)
    with pytest.raises(BadIndex, match="signature"):
        opened_index(SignedIndex(index=signed.manifest, mac=signed.mac), KEY, JOB, VersionId(0, 7))


def test_deltas_go_with_their_manifest(store: BlobStore, deltas: Deltas) -> None:
    parts = {"w": bf16(0)}
    for number in range(4):
        compared(deltas, publish(store, number, parts))
        parts = {"w": stepped(parts["w"], 50)}
    kept = {VersionId(0, 2), VersionId(0, 3)}
    gone = [store.path(entry.blob) for entry in index_of(store, 1).deltas]
    store.collect(kept)
    assert len(gone) == 1
    assert not gone[0].exists()
    assert store.read_index(VersionId(0, 1)) is None
    for number in (2, 3):
        (entry,) = index_of(store, number).deltas
        store.read(entry.blob)  # of version 2 too, though its base is gone: an older worker may hold that
    store.index_path(VersionId(0, 3)).unlink()
    store.index_path(VersionId(0, 3)).write_bytes(b"no index")
    assert store.collect(kept) > 0
    assert store.read_index(VersionId(0, 3)) is None
    assert store.manifests() == sorted(kept)


def test_blobs_of_an_index_under_way_are_spared(store: BlobStore) -> None:
    publish(store, 0, {"w": b"ww"})
    blob = store.put(b"a delta")
    store.collect(set(store.manifests()), lambda: {blob})
    assert store.has(blob)
    entry = DeltaEntry(new="n", old="o", blob=blob, nbytes=7, itemsize=1)
    index = DeltaIndex(job=JOB, version=VersionId(0, 0), manifest="m", before=None, deltas=(entry,))
    store.write_index(index, sign_index(index, KEY))
    store.collect(set(store.manifests()))
    assert store.has(blob)
    store.collect(set())
    with pytest.raises(MissingManifest, match=r"0\.0"):
        store.write_index(index, sign_index(index, KEY))
    publish(store, 0, {"w": b"ww"})
    with pytest.raises(MissingBlob, match=blob):
        store.write_index(index, sign_index(index, KEY))

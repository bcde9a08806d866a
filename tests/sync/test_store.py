"""The store: content-addressed, whole or absent, and collected only where no manifest looks."""

from __future__ import annotations

import hashlib
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.contract.version_path import (
    BadManifest,
    SignedManifest,
    TensorEntry,
    VersionId,
    VersionManifest,
    opened,
    sign,
)
from syncline.runtime.store import (
    BadBlob,
    BlobStore,
    ManifestConflict,
    MissingBlob,
    MissingManifest,
    StoreHeld,
)

KEY = b"k" * 32


def manifest(store: BlobStore, number: int, parts: dict[str, bytes], step: int = 0) -> SignedManifest:
    tensors = tuple(
        TensorEntry(name=name, dtype="U8", shape=(len(raw),), nbytes=len(raw), digest=store.put(raw))
        for name, raw in sorted(parts.items())
    )
    body = VersionManifest(
        job="j0123456789",
        version=VersionId(0, number),
        parent=None,
        optimizer_step=step,
        contract="c",
        representation="bf16",
        model="m",
        tensors=tensors,
    )
    return sign(body, KEY)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "store")


@given(data=st.binary(max_size=200_000))
@settings(max_examples=40, deadline=None)
def test_what_was_put_is_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    store = BlobStore(tmp_path_factory.mktemp("s"))
    digest = store.put(data)
    assert digest == hashlib.sha256(data).hexdigest() == store.put(memoryview(data))
    assert bytes(store.read(digest)) == data


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_damage_is_found_and_put_heals_it(store: BlobStore, size: int) -> None:
    data = b"\x01" * size
    digest = store.put(data)
    path = store.path(digest)
    path.chmod(0o600)
    path.write_bytes(b"\x01" * (size - 1) + b"\x02")
    with pytest.raises(BadBlob, match=digest):
        store.read(digest)
    store.put(data)
    assert bytes(store.read(digest)) == data


def test_a_view_is_private(store: BlobStore) -> None:
    digest = store.put(bytes(1 << 20))
    store.read(digest)[0] = 7
    assert store.read(digest)[0] == 0


@pytest.mark.parametrize("digest", ["../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", ""])
def test_a_path_comes_from_a_digest_only(store: BlobStore, digest: str) -> None:
    with pytest.raises(ValueError, match="hex"):
        store.path(digest)


def test_a_full_disk_leaves_nothing(store: BlobStore, tmp_path: Path) -> None:
    """A file-size limit makes the write fail half way, as a full disk does."""
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from syncline.runtime.store import BlobStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.RLIM_INFINITY}))\n"
        "try: BlobStore(Path(sys.argv[1])).put(bytes(1 << 20))\n"
        "except OSError as error: sys.exit(33)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=False, timeout=60)
    assert done.returncode == 33
    assert list((tmp_path / "store" / "blobs").iterdir()) == []


def test_manifests_come_back_and_open(store: BlobStore) -> None:
    signed = manifest(store, 3, {"a": b"aa"})
    store.write_manifest(signed)
    store.write_manifest(signed)
    assert store.manifests() == [VersionId(0, 3)]
    assert opened(store.read_manifest(VersionId(0, 3)), KEY).tensors[0].name == "a"
    with pytest.raises(MissingManifest, match=r"0\.4"):
        store.read_manifest(VersionId(0, 4))


def test_a_version_has_one_manifest(store: BlobStore) -> None:
    store.write_manifest(manifest(store, 1, {"a": b"aa"}))
    with pytest.raises(ManifestConflict, match=r"0\.1"):
        store.write_manifest(manifest(store, 1, {"a": b"ab"}))
    assert [path.suffix for path in (store.path("0" * 64).parent.parent / "manifests").iterdir()] == [".json"]


def test_a_manifest_needs_its_blobs(store: BlobStore) -> None:
    signed = manifest(store, 1, {"layer.weight": b"aa"})
    store.collect(set())
    with pytest.raises(MissingBlob, match=r"layer\.weight"):
        store.write_manifest(signed)


def test_collect_keeps_what_a_kept_manifest_names(store: BlobStore) -> None:
    for number in range(4):
        parts = {"same": b"s" * 1000, "moving": bytes([number]) * 1000}
        store.write_manifest(manifest(store, number, parts))
    freed = store.collect({VersionId(0, 2), VersionId(0, 3)})
    assert freed > 2000
    assert store.manifests() == [VersionId(0, 2), VersionId(0, 3)]
    for version in store.manifests():
        for tensor in opened(store.read_manifest(version), KEY).tensors:
            store.read(tensor.digest)
    assert len(list(store.path("0" * 64).parent.iterdir())) == 3
    assert store.collect(set(store.manifests())) == 0


def test_collect_stops_at_a_manifest_it_cannot_read(store: BlobStore, tmp_path: Path) -> None:
    digest = store.put(b"x")
    (tmp_path / "store" / "manifests" / "0.9.json").write_bytes(b"{")
    with pytest.raises(BadManifest, match=r"0\.9"):
        store.collect({VersionId(0, 9)})
    assert store.has(digest)


def test_collect_waits_for_a_holder(store: BlobStore, tmp_path: Path) -> None:
    other = BlobStore(tmp_path / "store")
    inside, go = threading.Event(), threading.Event()

    def writer() -> None:
        with other.hold():
            signed = manifest(other, 1, {"a": b"aa"})
            inside.set()
            go.wait(30)
            other.write_manifest(signed)

    thread = threading.Thread(target=writer)
    thread.start()
    assert inside.wait(30)
    freed: list[int] = []
    collector = threading.Thread(target=lambda: freed.append(store.collect({VersionId(0, 1)})))
    collector.start()
    collector.join(0.2)
    assert collector.is_alive()
    go.set()
    collector.join(30)
    thread.join(30)
    assert freed == [0]
    assert store.manifests() == [VersionId(0, 1)]


def test_collect_inside_hold_is_refused(store: BlobStore) -> None:
    with store.hold(), pytest.raises(StoreHeld):
        store.collect(set())


def test_leftovers_of_a_dead_writer_go(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "store" / "blobs" / "0123.tmp").write_bytes(b"half")
    assert store.collect(set()) == 4

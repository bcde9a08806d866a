"""What every kind that moves bytes does: the same digests, resumption, named failures, and the next order works."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fsspec
import msgspec
import pytest
from transport_rig import JOB, SIZES, TOTAL, Rig, content, half, same

from syncline.contract.version_path import BadManifest, VersionId, VersionManifest
from syncline.transport.incoming import Incoming
from syncline.transport.transport import (
    Damaged,
    Late,
    NoRoom,
    NotOffered,
    PullFailed,
    Superseded,
    Unreachable,
    WrongLength,
)


def of(manifest: VersionManifest, name: str) -> str:
    return next(entry.digest for entry in manifest.tensors if entry.name == name)


@contextmanager
def spoilt(rig: Rig, manifest: VersionManifest, name: str, data: bytes) -> Iterator[None]:
    """Other bytes under a blob's name where the source reads it, for a time."""
    digest = of(manifest, name)
    if rig.spec.url is None:
        path = rig.store.path(digest)
        right = path.read_bytes()
        for held in (data, right):
            path.unlink()
            path.write_bytes(held)
            if held is data:
                yield
    else:
        fs, root = fsspec.core.url_to_fs(rig.spec.url, skip_instance_cache=True)
        fs.pipe_file(f"{root}/{JOB}/blobs/{digest}", data)
        yield
        # a shorter or longer one would be uploaded anew with the next offer; one of this length is put right by hand
        fs.pipe_file(f"{root}/{JOB}/blobs/{digest}", content(name, manifest.version.number))


def test_every_blob_comes_under_its_digest_and_only_what_changed_comes_again(rig: Rig) -> None:
    worker = rig.puller()
    first = rig.pull(worker, rig.publish(0))
    assert (first.full, first.held, first.resumed, first.deltas) == (TOTAL, 0, 0, 0)
    assert first.kind == rig.spec.kind
    assert 0 < first.seconds < 20
    second = rig.pull(worker, rig.publish(1), serving=0)
    assert (second.full, second.held) == (TOTAL - SIZES["embed"], SIZES["embed"])
    assert rig.pull(worker, rig.publish(1), serving=0).full == 0, "the same version twice moves nothing"


def test_a_worker_keeps_what_it_serves_and_stages_and_nothing_else(rig: Rig) -> None:
    worker = rig.puller()
    versions = [rig.publish(number) for number in range(3)]
    rig.pull(worker, versions[0])
    rig.pull(worker, versions[1], serving=0)
    rig.pull(worker, versions[2], serving=1)
    assert worker.store.manifests() == [VersionId(0, 1), VersionId(0, 2)]
    assert not worker.store.has(of(versions[0], "layer.0"))
    assert worker.store.has(of(versions[1], "layer.0"))


def test_a_broken_pull_goes_on_at_its_byte(rig: Rig) -> None:
    manifest = rig.publish(0)
    worker = rig.puller()
    half(worker, manifest, "embed", content("embed", 0)[:1_234_567])
    pulled = rig.pull(worker, manifest)
    assert (pulled.full, pulled.resumed) == (TOTAL - 1_234_567, 1_234_567)


@pytest.mark.parametrize("left", [b"x" * 1000, b"x" * (SIZES["embed"] + 5), b"x" * SIZES["embed"]])
def test_what_lies_there_half_and_is_wrong_comes_anew(rig: Rig, left: bytes) -> None:
    manifest = rig.publish(0)
    worker = rig.puller()
    half(worker, manifest, "embed", left)
    assert rig.pull(worker, manifest).resumed == 0


def test_a_worker_that_dies_half_way_finds_what_came(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = rig.publish(0)

    class Dies(BaseException):
        """As a kill: nothing is tidied up."""

    write = Incoming.write

    def dies(into: Incoming, data: memoryview) -> None:
        write(into, data)
        if into.held > 1_000_000:
            raise Dies

    with monkeypatch.context() as patch:
        patch.setattr(Incoming, "write", dies)
        with pytest.raises(Dies):
            rig.pull(rig.puller(), manifest)
    pulled = rig.pull(rig.puller(), manifest)
    assert pulled.resumed > 1_000_000
    assert pulled.full + pulled.resumed + pulled.held == TOTAL


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (lambda raw: raw[:-1], WrongLength),
        (lambda raw: raw + b"x", WrongLength),
        (lambda raw: b"", WrongLength),
        (lambda raw: bytes([raw[0] ^ 1]) + raw[1:], Damaged),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 128]), Damaged),
        (lambda raw: content("layer.0", 9)[: len(raw)], Damaged),
    ],
    ids=["truncated", "longer", "emptied", "first bit", "last bit", "replaced"],
)
def test_a_damaged_source_is_named_and_the_next_order_works(
    rig: Rig, data: Callable[[bytes], bytes], error: type[PullFailed]
) -> None:
    manifest = rig.publish(0)
    worker = rig.puller()
    with (
        spoilt(rig, manifest, "layer.1", data(content("layer.1", 0))),
        pytest.raises(error, match=r"worker w0: version 0\.0: tensor layer\.1: "),
    ):
        rig.pull(worker, manifest)
    assert not worker.store.has(of(manifest, "layer.1"))
    assert worker.store.manifests() == []
    pulled = rig.pull(worker, manifest)
    assert pulled.held > 0, "what was right stays"


def test_a_version_that_is_not_offered_is_named(rig: Rig) -> None:
    manifest = rig.publish(0)
    worker = rig.puller()
    rig.store.collect(set())
    rig.offering.retire()
    with pytest.raises(NotOffered, match=r"worker w0: version 0\.0"):
        rig.pull(worker, manifest)
    rig.pull(worker, rig.publish(1))


def test_a_manifest_of_another_key_or_another_digest_brings_nothing(rig: Rig) -> None:
    worker = rig.puller()
    manifest = rig.publish(0, key=b"another key")
    with pytest.raises(BadManifest, match=r"worker w0: version 0\.0"):
        rig.pull(worker, manifest)
    other = rig.publish(1)
    order = rig.order(msgspec.structs.replace(other, optimizer_step=77))
    with pytest.raises(Damaged, match=r"worker w0: version 0\.1: the manifest that came"):
        worker.pull(order, None)
    assert worker.store.manifests() == []
    rig.pull(worker, other)


def test_damage_in_the_workers_own_store_is_found_when_an_engine_doubts_it(rig: Rig) -> None:
    manifest = rig.publish(0)
    worker = rig.puller()
    rig.pull(worker, manifest)
    path = worker.store.path(of(manifest, "layer.0"))
    path.chmod(0o644)
    path.write_bytes(bytes(SIZES["layer.0"]))
    worker.doubt()
    assert rig.pull(worker, manifest).full == SIZES["layer.0"]


def test_two_workers_at_once(rig: Rig) -> None:
    manifest = rig.publish(0)
    workers = {name: rig.puller(name) for name in ("w0", "w1")}
    orders = {name: rig.order(manifest, name) for name in workers}
    with ThreadPoolExecutor(2) as pool:
        pulls = {name: pool.submit(worker.pull, orders[name], None) for name, worker in workers.items()}
    for name, pull in pulls.items():
        signed, pulled = pull.result()
        assert pulled.full == TOTAL
        same(workers[name], signed, manifest)


def test_a_newer_order_ends_a_pull(rig: Rig) -> None:
    manifest = rig.publish(0)
    worker = rig.puller()
    order = rig.order(manifest)
    worker.supersede(order.seq + 1)
    with pytest.raises(Superseded, match="worker w0"):
        worker.pull(order, None)
    rig.pull(worker, manifest)


def test_a_deadline_ends_a_pull_and_the_next_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = rig.publish(0)
    worker = rig.puller(timeout=1.0)
    write = Incoming.write
    over = threading.Event()

    def slow(into: Incoming, data: memoryview) -> None:
        write(into, data)
        over.wait(0.6)

    with monkeypatch.context() as patch:
        patch.setattr(Incoming, "write", slow)
        with pytest.raises(Late, match=r"worker w0: .*not within 1 s"):
            rig.pull(worker, manifest)
    assert rig.pull(rig.puller(), manifest).resumed > 0


def test_the_source_may_be_served_by_a_new_process(rig: Rig) -> None:
    manifest = rig.publish(0)
    worker = rig.puller(timeout=1.5)
    old = rig.order(manifest).source
    rig.offering.close()
    if rig.spec.kind != "objects":  # they outlive the process
        began = time.monotonic()
        with pytest.raises(Unreachable, match=r"worker w0: version 0\.0: manifest: not within 1\.5 s: .+"):
            worker.pull(rig.order(manifest, source=old), None)
        assert time.monotonic() - began < 6
    rig.offered()
    rig.pull(rig.puller(), manifest)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=False)
    if done.returncode:
        pytest.skip("mounting is for root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_named_and_a_larger_one_goes_on(rig: Rig, small_disk: Path) -> None:
    manifest = rig.publish(0)
    worker = rig.puller(own=small_disk)
    with pytest.raises(NoRoom, match=r"worker w0: version 0\.0: tensor embed: .*No space left"):
        rig.pull(worker, manifest)
    assert not list((small_disk / "incoming").iterdir()), "what came is given back"
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    rig.pull(worker, manifest)


def test_shared_files_move_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "files")
    manifest = rig.publish(0)
    worker = rig.puller()
    pulled = rig.pull(worker, manifest)
    assert (pulled.kind, pulled.full, pulled.held) == ("files", 0, TOTAL)
    assert worker.store.path(of(manifest, "embed")).samefile(rig.store.path(of(manifest, "embed")))
    assert not list((tmp_path / "w0").iterdir()), "a worker that maps the store has none of its own"
    wrong = rig.order(msgspec.structs.replace(manifest, optimizer_step=77))
    with pytest.raises(Damaged, match="store's manifest"):
        worker.pull(wrong, None)
    rig.close()

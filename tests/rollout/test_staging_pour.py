"""How a blob comes into the engine's buffer: piece by piece, read back from there, and nothing taken for granted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conformance.forge import KEY
from test_staging_cost import SMALL, World

from syncline.contract.version_path import TensorEntry, opened, sign
from syncline.rollout.engine import StageFailed
from syncline.rollout.engines import readback
from syncline.rollout.engines import weights as engine_weights
from syncline.rollout.engines.readback import CHUNK, BlobChanged, Scratch, digest_of, fill
from syncline.rollout.engines.weights import Weights
from syncline.runtime.store import BlobStore, MissingBlob

VALUES = CHUNK // 2  # BF16 values of a piece


@contextmanager
def blob_of(path: Path, values: torch.Tensor) -> Iterator[tuple[int, str]]:
    """A file of the tensor's bytes, open, with its digest."""
    raw = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(raw)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor, hashlib.sha256(raw).hexdigest()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("count", [0, 1, 7, VALUES - 1, VALUES, VALUES + 1, 2 * VALUES + 5])
@pytest.mark.parametrize(
    ("travels", "held"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.uint8, torch.uint8),
        (torch.int64, torch.int64),
    ],
    ids=str,
)
def test_what_is_poured_is_there_and_has_the_blobs_digest(
    tmp_path: Path, travels: torch.dtype, held: torch.dtype, count: int
) -> None:
    values = torch.arange(count).mul(7).remainder(251).to(travels)
    own = torch.full((count,), 3, dtype=held)
    with blob_of(tmp_path / "blob", values) as (blob, digest):
        assert Scratch().pour(own, blob, travels) == digest
    assert torch.equal(own, values.to(held))
    assert digest_of(own, travels) == digest


def test_one_scratch_serves_tensors_of_any_kind_one_after_the_other(tmp_path: Path) -> None:
    scratch = Scratch()
    for shape, travels in (((3, VALUES), torch.bfloat16), ((), torch.float32), ((5,), torch.bfloat16)):
        values = torch.randn(shape).to(travels)
        own = torch.zeros(shape)
        with blob_of(tmp_path / "blob", values) as (blob, digest):
            assert scratch.pour(own, blob, travels) == digest
        assert torch.equal(own, values.float())


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=str)
def test_a_blob_that_shrinks_while_it_is_read_ends_the_pour(tmp_path: Path, held: torch.dtype) -> None:
    own = torch.zeros(2 * VALUES, dtype=held)
    with (
        blob_of(tmp_path / "blob", torch.ones(VALUES + 3).bfloat16()) as (blob, _),
        pytest.raises(BlobChanged, match=f"ends at byte {CHUNK + 6}"),
    ):
        Scratch().pour(own, blob, torch.bfloat16)


def test_a_buffer_that_does_not_keep_what_is_written_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is of the buffer, not of what was read: one bit that fades behind the write is told."""
    own, fits = torch.zeros(2 * VALUES), readback._fits
    flips: Iterator[int] = iter(())

    def fading(part: torch.Tensor, dtype: torch.dtype) -> bool:
        part.view(torch.int32)[11] ^= next(flips)
        return fits(part, dtype)

    monkeypatch.setattr(readback, "_fits", fading)
    with blob_of(tmp_path / "blob", torch.randn(2 * VALUES).bfloat16()) as (blob, digest):
        for flip in (1, 1 << 15, 1 << 16, 1 << 30):
            flips = iter((0, flip))  # of the first piece, and of the second
            assert Scratch().pour(own, blob, torch.bfloat16) != digest
        flips = iter((0, 0))
        assert Scratch().pour(own, blob, torch.bfloat16) == digest


def test_a_view_whose_elements_share_memory_is_never_proven() -> None:
    """Each piece of it would read back as it was written, and the next would write over it."""
    own = torch.zeros(12).as_strided((4, 6), (2, 1))
    assert not own.is_contiguous()
    source = torch.arange(24.0).view(4, 6).bfloat16()
    assert fill(own, source) != digest_of(source, torch.bfloat16)


def test_a_transposed_view_is_written_and_read_back_in_its_own_order(tmp_path: Path) -> None:
    store, source = BlobStore(tmp_path), torch.randn(5, 9).bfloat16()
    digest = store.put(source.view(-1).view(torch.uint8).numpy().data)
    entry = TensorEntry(name="t", dtype="BF16", shape=(5, 9), nbytes=90, digest=digest)
    own = torch.zeros(9, 5).t()
    assert engine_weights._poured(entry, own, store, Scratch()) == digest
    assert torch.equal(own, source.float())


def test_a_descriptor_is_of_the_blob_and_of_nothing_else(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = store.put(b"some bytes")
    descriptor = store.descriptor(digest)
    try:
        assert os.pread(descriptor, 100, 0) == b"some bytes"
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
    with pytest.raises(MissingBlob, match="f" * 64):
        store.descriptor("f" * 64)
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        store.descriptor("../lock")


@pytest.mark.parametrize("threads", [1, 3])
def test_what_one_thread_finds_wrong_ends_the_work_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The largest tensor comes first; when it is refused, at most each other thread's tensor is still written."""
    world = World(tmp_path, SMALL)
    manifest = world.manifest()
    largest = max(manifest.tensors, key=lambda entry: entry.nbytes)
    begun: list[str] = []
    poured = engine_weights._poured

    def noted(entry: TensorEntry, own: torch.Tensor, store: BlobStore, scratch: Scratch) -> str:
        begun.append(entry.name)
        found = poured(entry, own, store, scratch)
        return found if entry != largest else "0" * 64

    monkeypatch.setattr(engine_weights, "_poured", noted)
    weights, signed = Weights(world.engine._expected), sign(manifest, KEY)
    with pytest.raises(StageFailed, match=rf"tensor {largest.name} reads back with digest 000"):
        weights.load(signed, opened(signed, KEY), world.store, threads)
    after = list(begun)
    assert largest.name in after
    assert weights.digest == ""
    assert threads > 1 or after == [largest.name]
    # nothing is written once `load` has ended, and what was refused is written anew by the next
    begun.clear()
    monkeypatch.setattr(engine_weights, "_poured", poured)
    weights.load(signed, opened(signed, KEY), world.store, threads)
    assert weights.version == manifest.version
    assert weights.copied == manifest.nbytes() - sum(
        entry.nbytes for entry in manifest.tensors if entry.name in after and entry != largest
    )

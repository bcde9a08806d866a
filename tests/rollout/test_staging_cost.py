"""What staging may cost and committing may not: page faults, hashes and calls are counted. A busy machine changes none.

Models of two sizes and one depth. Time is bounded once, loosely: `bench/activation.py` measures it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from conformance.forge import JOB, KEY, MODELS

from syncline.contract.job import ModelSpec
from syncline.contract.version_path import SignedManifest, TensorEntry, VersionId, VersionManifest, sign
from syncline.reference.model import empty_model, model_folder
from syncline.reference.state import state_plan
from syncline.rollout.engine import CommitPolicy, Request, Sampling, StageFailed
from syncline.rollout.engines import readback
from syncline.rollout.engines import weights as engine_weights
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.engines.weights import Weights
from syncline.runtime.store import BlobStore

DRAIN = CommitPolicy(kind="drain")
CARRIED = CommitPolicy(kind="in_place", kv="carried", carried_age=1000)
POLICIES = [DRAIN, CommitPolicy(kind="continue_old"), CARRIED, CommitPolicy(kind="in_place")]
PAGE = 4096
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_THP_DISABLE = 41
ROWS = 3
SMALL, LARGE = 64, 512  # hidden sizes: 0.3 and 19 MB of FP32


class World:
    """An engine, and versions that have no tensor in common."""

    def __init__(self, folder: Path, hidden: int) -> None:
        self.models, self.root, self.store = folder / "models", folder, BlobStore(folder / "store")
        where = self.models / "wide"
        where.mkdir(parents=True)
        config = json.loads((MODELS / "tiny-dense" / "config.json").read_text())
        config |= {"hidden_size": hidden, "intermediate_size": 2 * hidden}
        (where / "config.json").write_text(json.dumps(config))
        self.folder = model_folder(self.models, "wide")
        self.windows = state_plan(empty_model(self.folder)).windows
        self.engine = ReferenceEngine(self.models, ModelSpec(name="wide"), JOB, KEY, ROWS)
        self.number = -1

    def manifest(self) -> VersionManifest:
        """The next version, in the store."""
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        entries = []
        for name, window in self.windows.items():
            tensor = torch.randn(window.shape, generator=generator).mul_(0.05).bfloat16()
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            digest = self.store.put(raw.data)
            entries.append(
                TensorEntry(name=name, dtype="BF16", shape=window.shape, nbytes=raw.nbytes, digest=digest)
            )
        return VersionManifest(
            job=JOB,
            version=VersionId(0, self.number),
            parent=None,
            optimizer_step=self.number,
            contract="c" * 64,
            representation="bf16",
            model=self.folder.config_digest,
            tensors=tuple(entries),
        )

    def signed(self) -> SignedManifest:
        return sign(self.manifest(), KEY)

    def serve(self) -> None:
        self.engine.stage(self.signed(), self.store)
        self.engine.commit(DRAIN)

    def both_buffers(self) -> None:
        """From here on, a staging finds a buffer that was written before."""
        self.serve()
        self.serve()

    def run(self) -> None:
        """Requests that run until they are aborted."""
        for i in range(ROWS):
            fixed = Sampling(max_tokens=400, min_tokens=400)
            self.engine.submit(
                Request(trajectory=f"{JOB}-{i}-0", prompt=(1, 5 + i, 9), seed=(i,), sampling=fixed)
            )
        self.engine.step()

    def stop(self) -> None:
        for i in range(ROWS):
            self.engine.abort(f"{JOB}-{i}-0")

    def weights(self) -> Weights:
        found = self.engine._active()
        assert found is not None
        return found

    @property
    def pages(self) -> int:
        """Of one buffer: FP32."""
        return sum(torch.Size(w.shape).numel() * 4 for w in self.windows.values()) // PAGE


def resident(tensor: torch.Tensor) -> bool:
    """Whether each page under the tensor is in memory: no access to it can fault."""
    first = tensor.data_ptr() // PAGE * PAGE
    length = tensor.data_ptr() + tensor.nbytes - first
    found = (ctypes.c_ubyte * -(-length // PAGE))()
    assert LIBC.mincore(ctypes.c_void_p(first), ctypes.c_size_t(length), found) == 0, "mincore failed"
    return all(page & 1 for page in found)


@pytest.fixture(scope="module", autouse=True)
def small_pages() -> Iterator[None]:
    """Where the system backs memory with huge pages, one fault stands for 512: pages could not be counted."""
    assert LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    yield
    assert LIBC.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0


def faults() -> int:
    """Page faults of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def faults_of_all() -> int:
    """Page faults of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


ONCE = (
    "ABCMeta.__subclasscheck__",
    "_abc_subclasscheck",
)  # isinstance asks them of each class for the first time alone


@contextmanager
def calls() -> Iterator[Counter[str]]:
    """Names of all functions that are called inside, with how often."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            seen[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            seen[what.__qualname__] += 1

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        for name in ONCE:
            del seen[name]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    made = {hidden: World(tmp_path_factory.mktemp("w"), hidden) for hidden in (SMALL, LARGE)}
    for world in made.values():
        world.both_buffers()
    return made


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != POLICIES[3]], ids=lambda p: p.kind)
def test_a_commit_copies_nothing_hashes_nothing_and_calls_as_much_for_any_size(
    worlds: dict[int, World], policy: CommitPolicy
) -> None:
    called: list[Counter[str]] = []
    for world in worlds.values():
        if policy.kind != "drain":
            world.run()
        world.engine.stage(world.signed(), world.store)
        staged = world.engine._staged
        with calls() as seen:
            committed = world.engine.commit(policy)
        assert committed is not None
        assert world.weights() is staged, "what was staged serves, and no copy of it"
        world.engine.step()
        world.stop()
        called.append(seen)
    assert called[0] == called[1]
    assert not [name for name in called[1] if "copy_" in name or "sha256" in name or "hash" in name.lower()]
    assert sum(called[1].values()) < 2000


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.kind} {p.kv}")
def test_a_commit_touches_no_page_of_either_buffer(worlds: dict[int, World], policy: CommitPolicy) -> None:
    """Neither do the decode steps behind it, of the old version's requests and of new ones, nor the next staging."""
    world = worlds[LARGE]
    few = world.pages // 30
    assert world.pages > 3000
    for _ in range(3):  # what is not the weights' is warm after the first
        if policy.kind != "drain":
            world.run()
        before = faults_of_all()
        world.engine.stage(world.signed(), world.store)
        staging = faults_of_all() - before
        before = faults()
        assert world.engine.commit(policy) is not None
        commit = faults() - before
        world.engine.step()
        world.stop()
        world.run()
        behind = faults() - before
        world.stop()
    assert commit < few
    assert behind < few
    # half as many pages of blobs are mapped as the buffer has, in runs of several; the buffer's are there
    assert staging < world.pages // 2


def test_a_first_staging_touches_every_page_before_the_commit(tmp_path: Path) -> None:
    world = World(tmp_path, LARGE)
    world.engine.stage(world.signed(), world.store)
    staged = world.engine._staged
    assert staged is not None
    assert all(resident(view) for view in staged.packed.views.values())
    before = faults()
    world.engine.commit(DRAIN)
    world.run()
    assert faults() - before < world.pages // 4


def test_the_counters_see_what_they_are_asked_for() -> None:
    """Fresh memory is not there; each of its pages faults once when it is written."""
    fresh = mmap.mmap(-1, 1000 * PAGE)
    view = torch.frombuffer(fresh, dtype=torch.uint8)
    assert not resident(view)
    of_thread, of_all = faults(), faults_of_all()
    view.fill_(1)
    assert resident(view)
    assert faults() - of_thread >= 1000
    assert faults_of_all() - of_all >= 1000


def test_buffers_are_taken_again_and_never_freed_while_requests_come_and_go(tmp_path: Path) -> None:
    """Under `continue_old` three sets of weights live at most; to free one would stop decoding for as long as it is
    large.
    """
    world, seen, policy = World(tmp_path, SMALL), set[int](), CommitPolicy(kind="continue_old")
    for _ in range(8):
        world.engine.stage(world.signed(), world.store)
        kept = world.engine._staged
        assert kept is not None
        seen.add(kept.packed.views["model.norm.weight"].data_ptr())
        if world.engine.commit(policy) is None:
            world.stop()
            assert world.engine.commit(policy) is not None
        world.run() if world.engine.room >= ROWS else world.engine.step()
    assert 2 <= len(seen) <= 3
    world.stop()
    everything = [*world.engine._spares, *(lane.weights for lane in world.engine._lanes)]
    assert len(everything) == len(seen)


def test_each_tensor_is_hashed_once_and_in_the_engines_own_buffer(
    worlds: dict[int, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds[LARGE]
    manifest = world.manifest()
    hashed = 0
    plain: Callable[..., Any] = hashlib.sha256

    class Counting:
        def __init__(self, data: Any = b"") -> None:
            nonlocal hashed
            self._inner = plain(data)
            hashed += memoryview(data).nbytes

        def update(self, data: Any) -> None:
            nonlocal hashed
            hashed += memoryview(data).nbytes
            self._inner.update(data)

        def hexdigest(self) -> str:
            return str(self._inner.hexdigest())

    monkeypatch.setattr(readback, "hashlib", SimpleNamespace(sha256=Counting))
    world.engine.stage(sign(manifest, KEY), world.store)
    assert hashed == manifest.nbytes()
    world.engine.abort_stage()


def test_a_value_that_is_no_bf16_is_not_hidden_by_rounding(worlds: dict[int, World]) -> None:
    """A base that is held is hashed and not written: half a unit in the last place would round away."""
    world = worlds[SMALL]
    signed = world.signed()
    world.engine.stage(signed, world.store)
    kept = world.engine._staged
    assert kept is not None
    name = "model.layers.1.mlp.up_proj.weight"
    view = kept.packed.views[name]
    good = float(view[3, 3])
    view.view(torch.int32)[3, 3] |= 1
    assert float(view[3, 3]) != good
    assert float(view[3, 3].bfloat16()) == good
    world.engine.abort_stage()
    world.engine.stage(signed, world.store)
    assert world.engine._staged is kept
    assert float(view[3, 3]) == good
    assert kept.copied == 2 * view.numel()
    world.engine.abort_stage()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_blob_is_told_from_a_wrong_copy(
    worlds: dict[int, World], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    world = worlds[SMALL]
    monkeypatch.setattr("syncline.rollout.engines.reference.loaders", lambda serving: threads)
    name = "model.layers.0.mlp.down_proj.weight"
    manifest = world.manifest()
    blob = world.store.path(next(t.digest for t in manifest.tensors if t.name == name))
    kept = world.root / "kept"
    shutil.copyfile(blob, kept)
    blob.chmod(0o600)
    raw = bytearray(blob.read_bytes())
    raw[17] ^= 4
    blob.write_bytes(raw)
    with pytest.raises(StageFailed, match=rf"tensor {name}: blob .* holds bytes with digest"):
        world.engine.stage(sign(manifest, KEY), world.store)
    shutil.copyfile(kept, blob)
    poured = engine_weights._poured

    def doubled(entry: TensorEntry, own: torch.Tensor, store: BlobStore, scratch: readback.Scratch) -> str:
        poured(entry, own, store, scratch)
        return readback.fill(own, own.bfloat16() * 2)

    with monkeypatch.context() as patch:
        patch.setattr(engine_weights, "_poured", doubled)
        with pytest.raises(StageFailed, match=r"tensor .* reads back with digest .*, the manifest says"):
            world.engine.stage(sign(manifest, KEY), world.store)
    assert world.engine.staged is None
    assert world.engine.stage(sign(manifest, KEY), world.store).verdict == "verified"
    world.engine.abort_stage()


def test_a_commit_pauses_for_less_than_a_decode_step_and_ten_milliseconds(worlds: dict[int, World]) -> None:
    """The best of some: a busy machine makes any single one late."""
    world = worlds[LARGE]
    best = float("inf")
    for _ in range(6):
        world.run()
        steps = []
        for _ in range(5):
            began = time.perf_counter()
            world.engine.step()
            steps.append(time.perf_counter() - began)
        world.engine.stage(world.signed(), world.store)
        committed = world.engine.commit(CARRIED)
        assert committed is not None
        assert (committed.in_flight, committed.recomputed) == (ROWS, 0)
        assert committed.refilled < 0.5 * committed.pause + 1e-3
        world.stop()
        best = min(best, committed.pause - median(steps))
    assert best < 0.010


def test_contexts_made_anew_are_reported_apart(worlds: dict[int, World]) -> None:
    world = worlds[SMALL]
    world.run()
    world.engine.stage(world.signed(), world.store)
    committed = world.engine.commit(POLICIES[3])
    assert committed is not None
    assert committed.recomputed == ROWS
    assert 0 < committed.refilled <= committed.pause
    world.stop()

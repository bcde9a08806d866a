"""What it costs to bring a version to a worker and to let it serve: publish, stage, commit, by size of the weights.

Peers move the same tensors in the same run: a plain file copy into a new file of the same file system, safetensors'
save and load (into FP32 buffers that exist, as the engine's do), a gloo broadcast to a second process. All read from
warm page cache. Publishing is what sync does with an export: hash it, convert (BF16 stays BF16), hash, write and fsync
each tensor, sign. Staging is what a worker does: copy, widen to FP32, read back, hash. One thread decodes; staging has
the machine's other cores, or all where nothing is decoded.

The gap that a commit makes between two decode steps is `activation_gaps.py`'s.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import activation_gaps as gaps
import msgspec
import torch
from broadcast import broadcast
from rows import Row, Say, note, table
from safetensors.torch import load_file
from scaled import JOB, KEY, LARGE, MIDDLE, SMALL, Exported, Scaled, Size
from torch import Tensor

from syncline.contract.job import ModelSpec
from syncline.contract.version_path import SignedManifest
from syncline.rollout.engine import CommitPolicy
from syncline.rollout.engines.reference import ReferenceEngine

COMMAND = "python bench/activation.py"
CONTENTS = 3  # versions with nothing in common: with two buffers, each is always written anew
DRAIN = CommitPolicy(kind="drain")
FEW = 100_000_000  # bytes below which staging is repeated more often: it takes milliseconds
COPY = "shutil.copyfile into a new file"


class Moved(msgspec.Struct, kw_only=True):
    """Seconds of each repetition, by what was done with the same bytes."""

    copy: list[float] = []
    copy_fsync: list[float] = []
    publish: list[float] = []
    republish: list[float] = []
    save: list[float] = []
    load: list[float] = []
    broadcast: list[float] = []
    first: list[float] = []  # staging into buffers that were never written
    stage: list[float] = []
    stage_cpu: list[float] = []  # CPU seconds of all threads
    stage_copy: list[float] = []  # a copy right before each staging
    stage_copy_cpu: list[float] = []


class Bench:
    """One size."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.world = Scaled(folder, size)
        self.scratch = folder / "copy"
        self.exports: list[Exported] = []
        self.number = -1  # of the version staged last
        self.moved = Moved()

    # ---- one version's bytes by every way
    def publish_all(self) -> None:
        """Export and publish the contents. The ways are taken one after the other, version by version."""
        moved, buffers = self.moved, None
        for number in range(CONTENTS):
            tensors = self.world.tensors(number)
            exported, seconds = self.world.export(number, tensors)
            self.exports.append(exported)
            moved.save.append(seconds)
            if number == 0:
                moved.broadcast = broadcast(list(tensors.values()), self.scratch.parent, CONTENTS)
                buffers = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
            del tensors
            moved.load.append(timed(partial(load, exported.file, buffers or {})))
            moved.copy.append(self.copied(exported.file))
            moved.copy_fsync.append(self.copied(exported.file, fsync=True))
            moved.publish.append(timed(partial(self.world.publish, exported)))
        moved.republish.append(timed(lambda: self.world.publish(self.exports[-1])))
        del self.world.manifests[CONTENTS:]

    def copied(self, file: Path, *, fsync: bool = False) -> float:
        """Seconds of a copy of `file`."""
        self.scratch.unlink(missing_ok=True)
        began = time.perf_counter()
        shutil.copyfile(file, self.scratch)
        if fsync:
            descriptor = os.open(self.scratch, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        seconds = time.perf_counter() - began
        self.scratch.unlink()
        return seconds

    # ---- staging alone
    def next(self) -> SignedManifest:
        """A version that no buffer holds, under the next number."""
        self.number += 1
        return self.world.renumbered(self.number)

    def serve(self, engine: ReferenceEngine) -> tuple[float, float]:
        """Stage and commit with nothing in flight: seconds of the staging, and CPU seconds of all its threads."""
        signed, before = self.next(), time.process_time()
        seconds = timed(lambda: engine.stage(signed, self.world.store))
        cpu = time.process_time() - before
        engine.commit(DRAIN)
        return seconds, cpu

    def stage_alone(self, engine: ReferenceEngine, repetitions: int) -> None:
        """Both buffers for the first time, then over and over."""
        moved = self.moved
        moved.first = [self.serve(engine)[0] for _ in range(2)]
        for _ in range(repetitions * max(1, FEW // self.world.nbytes)):
            before = time.process_time()
            moved.stage_copy.append(self.copied(self.exports[0].file))
            moved.stage_copy_cpu.append(time.process_time() - before)
            seconds, cpu = self.serve(engine)
            moved.stage.append(seconds)
            moved.stage_cpu.append(cpu)

    def swap(self, engine: ReferenceEngine, policy: CommitPolicy, pool: ThreadPoolExecutor) -> gaps.Swapped:
        """Stage and commit under running requests."""
        copied = partial(self.copied, self.exports[0].file)
        return gaps.swap(engine, policy, pool, self.next, self.world.store, copied)


def measure(sizes: Sequence[Size], repetitions: int) -> list[Row]:
    """The rows of this part."""
    torch.set_num_threads(1)
    say = Say("activation", COMMAND)
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="sl-bench-") as made:
            note(f"activation: {size.name}")
            bench = Bench(Path(made), size)
            bench.publish_all()
            world = bench.world
            engine = ReferenceEngine(world.models, ModelSpec(name=world.name), JOB, KEY, gaps.ROWS)
            bench.stage_alone(engine, repetitions)
            swaps: dict[str, list[gaps.Swapped]] = {}
            with ThreadPoolExecutor(1) as pool:
                for name, policy in gaps.POLICIES.items():
                    swaps[name] = [bench.swap(engine, policy, pool) for _ in range(repetitions)]
            tell(say, bench, swaps)
    return say.rows


def tell(say: Say, bench: Bench, swaps: dict[str, list[gaps.Swapped]]) -> None:
    """One size's rows."""
    moved, case, nbytes = bench.moved, bench.world.size.name, bench.world.nbytes
    every = [swap for several in swaps.values() for swap in several]
    speeds = "bytes per second, "

    def over(figure: str, ours: Sequence[float], peers: Sequence[float], against: str) -> None:
        say.ratio(case, speeds + figure, [p / o for o, p in zip(ours, peers, strict=True)], against)

    brought = [p + median(moved.stage) for p in moved.publish]
    saved = [s + x for s, x in zip(moved.save, moved.load, strict=True)]
    libraries = f"safetensors {version('safetensors')}"
    over("stage over copy", moved.stage, moved.stage_copy, COPY)
    over("stage while decoding over copy", [s.stage for s in every], [s.copy for s in every], COPY)
    over("first stage over copy", moved.first, moved.copy[: len(moved.first)], COPY)
    over("publish over copy", moved.publish, moved.copy, COPY)
    over("publish over copy and fsync", moved.publish, moved.copy_fsync, COPY + " and fsync")
    over("publish unchanged over copy", moved.republish, moved.copy[-1:], COPY)
    over("publish and stage over save and load", brought, saved, f"{libraries} save_file, load_file")
    over(
        "publish and stage over broadcast",
        brought,
        moved.broadcast,
        f"torch {torch.__version__} gloo broadcast",
    )
    dearer = [o / c for o, c in zip(moved.stage_cpu, moved.stage_copy_cpu, strict=True)]
    say.ratio(case, "CPU, stage over copy", dearer, COPY)
    gaps.tell(say, case, swaps)
    say.count(case, "weights in BF16", nbytes / 1e6, "MB")
    for field in moved.__struct_fields__:
        values: list[float] = msgspec.structs.asdict(moved)[field]
        say.time(case, f"GB per second, {field}", [nbytes / seconds / 1e9 for seconds in values], "GB/s")


# ---- parts -------------------------------------------------------------------------------------------------
def load(file: Path, buffers: dict[str, Tensor]) -> None:
    """What a worker without versions does: read the file and copy it where the model lies."""
    for name, tensor in load_file(file).items():
        buffers[name].copy_(tensor)


def timed(run: Callable[[], object]) -> float:
    """Seconds on the clock."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--large", action="store_true", help="1 GB of weights too: 8 GB of memory, 4 GB of disk"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    chosen = (SMALL, MIDDLE, *((LARGE,) if given.large else ()))
    print(table(measure(chosen, given.repetitions)))

"""A whole checkpoint into each low-bit format: sync's converter beside the fastest ways of two public libraries.

    python bench/conversion.py                          # 1 GB in BF16; 6 GB of memory, 3 GB of disk, some minutes
    python bench/conversion.py --size "100 MB" --json runs/conversion.json

The checkpoint is one safetensors file, as a trainer exports it (`scaled.py`). Ours is `sync.convert` over it: plan,
tensor by tensor, packing and naming, a refusal of what is not finite. Theirs is the library's own call on each tensor
that our plan makes low-bit, read from the same file; a way that wants FP32 is charged for widening. Of the two ways
that are fastest on the largest tensor the one that is faster over all is the peer. One process, one thread, CPU
seconds, one format at a time; each side drops a tensor once it is made.

"with writing": ours adds what the store does (SHA-256 of each blob, a file each, fsync), theirs `save_file` of all
tensors. "share of codes that differ": over the whole checkpoint, for libraries whose rule is ours, FP32 in; INT4 is
converted with their rule, amax/7.5. NVFP4 projections that share an outer scale here have one each there, so that the
others alone are compared.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import scaled
import torch
from msgspec.structs import replace
from quantizer_peers import Peer, installed, peers
from quantizers import LIBRARIES, running_on
from rows import Row, Say, document, machine, note, table
from safetensors import safe_open
from safetensors.torch import save_file

from syncline.contract.artefact import parts
from syncline.contract.plan import PlanEntry
from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.runtime.store import BlobStore, Buffer
from syncline.sync.convert import Converted, convert
from syncline.sync.export import Export
from syncline.sync.source import source_of

COMMAND = "python bench/conversion.py"
CASES = {
    "fp8_block": "unified_fp8",
    "int4_g32": "int4_qat_w4a16",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4_qat_w4a16",
    "nvfp4": "nvfp4_w4a4",
}
"""Scheme of the weights -> recipe that has it."""
SIZES = {size.name: size for size in (scaled.TINY, scaled.SMALL, scaled.MIDDLE, scaled.LARGE)}
Work = Callable[[], Any]


class Nowhere(BlobStore):
    """Takes what it is given and keeps nothing: neither hashed nor written."""

    def add(self, data: Buffer) -> tuple[str, bool]:
        return "0" * 64, True


class Checkpoint:
    """A trainer's export of `size`, and both sides' ways through it."""

    def __init__(self, folder: Path, size: scaled.Size) -> None:
        made = scaled.Scaled(folder, size)
        exported, _ = made.export(0, made.tensors(0))
        self.folder, self.file, self.nbytes = folder, exported.file, made.nbytes
        self._export = Export(exported.file.parent, exported.minted.files)
        self._nowhere = Nowhere(folder / "nowhere")
        self._stores = 0

    def convert(self, contract: PrecisionContract, store: BlobStore | None = None) -> Converted:
        """By sync; None: into nothing."""
        return convert(source_of(self._export, contract), contract, store or self._nowhere, threads=1)

    def write(self, contract: PrecisionContract) -> tuple[Converted, BlobStore]:
        """Into a store that is new, brought to the disk."""
        self._stores += 1
        store = BlobStore(self.folder / f"store{self._stores}")
        with store.hold():
            return self.convert(contract, store), store

    def tensors(self, low: tuple[PlanEntry, ...]) -> Iterator[torch.Tensor]:
        """The weights that become low-bit, BF16, mapped."""
        with safe_open(self.file, "pt") as file:
            for entry in low:
                yield file.get_tensor(entry.name)

    def theirs(self, way: Peer, low: tuple[PlanEntry, ...]) -> None:
        """The library's way over all of them."""
        for x in self.tensors(low):
            way.quantize(x.to(way.dtype))

    def theirs_written(self, way: Peer, low: tuple[PlanEntry, ...]) -> None:
        """The same, into one file."""
        made: dict[str, torch.Tensor] = {}
        for entry, x in zip(low, self.tensors(low), strict=True):
            found = plain(way.quantize(x.to(way.dtype)))
            made |= {f"{entry.name}.{i}": tensor.contiguous() for i, tensor in enumerate(found)}
        save_file(made, self.folder / "theirs.safetensors")

    def close(self) -> None:
        self._export.close()


def measure(size: scaled.Size, repetitions: int, cases: tuple[str, ...] = tuple(CASES)) -> list[Row]:
    """The rows of this part."""
    say = Say("conversion", COMMAND if size is scaled.LARGE else f'{COMMAND} --size "{size.name}"')
    missing = [library for library in LIBRARIES if not installed(library)]
    if missing:
        note(f"conversion: peers not installed ({', '.join(missing)}): pip install -e '.[bench-peers]'")
    with tempfile.TemporaryDirectory(prefix="sl-convert-") as folder, running_on(1):
        note(f"conversion: a checkpoint of {size.name}")
        checkpoint = Checkpoint(Path(folder), size)
        try:
            for case in cases:
                note(f"conversion: {case}")
                one_format(say, checkpoint, case, repetitions)
                gc.collect()
        finally:
            checkpoint.close()
    return say.rows


def one_format(say: Say, checkpoint: Checkpoint, scheme: str, repetitions: int) -> None:
    """Bytes first, then time."""
    contract, ways = _contract(scheme), peers(scheme)
    case = f"{scheme}, {checkpoint.nbytes / 1e9:.3g} GB in BF16"
    done, store = checkpoint.write(contract)  # compiled by now
    low = done.plan.low_bit()
    say.share(case, "share of bytes that become low-bit", _weight(low) / checkpoint.nbytes, "checkpoint")
    compare(say, case, checkpoint, done, store, ways)
    fastest = _fastest(checkpoint, low, ways)
    theirs = None if fastest is None else lambda: checkpoint.theirs(fastest, low)
    written = None if fastest is None else lambda: checkpoint.theirs_written(fastest, low)
    label = "" if fastest is None else fastest.name
    for figure, ours, peer in (
        ("conversion", lambda: checkpoint.convert(contract), theirs),
        ("conversion with writing", lambda: checkpoint.write(contract), written),
    ):
        _alternate(say, case, figure, checkpoint.nbytes / 1e9, (ours, peer), label, repetitions)


def compare(
    say: Say, case: str, checkpoint: Checkpoint, done: Converted, store: BlobStore, ways: list[Peer]
) -> None:
    """Codes of each tensor with those of each library whose rule is ours."""
    digests = {entry.name: entry.digest for entry in done.tensors}
    low = tuple(entry for entry in done.plan.low_bit() if not entry.outer or entry.outer == entry.name)
    shared = {entry.outer for entry in done.plan.low_bit() if entry.outer and entry.outer != entry.name}
    low = tuple(entry for entry in low if entry.name not in shared)
    for way in ways:
        if way.codes is None:
            continue
        wrong = total = 0
        for entry, x in zip(low, checkpoint.tensors(low), strict=True):
            codes = next(part for part in parts(entry) if part.role == "codes")
            ours = np.frombuffer(store.read(digests[codes.name]), np.uint8)
            their = way.codes(way.quantize(x.float())).contiguous().view(torch.uint8).numpy().reshape(-1)
            wrong += int((ours != their).sum())
            total += ours.size
        figure = f"share of codes that differ, {way.name.partition(' ')[0]}"
        say.share(case, figure, wrong / total, f"{way.name}; {total:,} bytes of {len(low)} tensors")


def plain(made: Any) -> list[torch.Tensor]:
    """The tensors that a library's result is made of."""
    if isinstance(made, dict):
        return [one for value in made.values() for one in plain(value)]
    if isinstance(made, tuple | list):
        return [one for value in made for one in plain(value)]
    if type(made) is torch.Tensor:
        return [made]
    if isinstance(made, torch.Tensor):  # a subclass, which names its parts
        names, _ = made.__tensor_flatten__()  # type: ignore[attr-defined]
        return [one for name in names for one in plain(vars(made).get(name))]
    return []


def _contract(scheme: str) -> PrecisionContract:
    contract = RECIPES[CASES[scheme]]
    if not scheme.startswith("int4"):
        return contract
    theirs = [replace(one, weight=replace(one.weight, rule="amax/7.5")) for one in contract.families]
    return replace(contract, families=tuple(theirs))


def _fastest(checkpoint: Checkpoint, low: tuple[PlanEntry, ...], ways: list[Peer]) -> Peer | None:
    """Of the two ways that are fastest on the largest tensor, the faster one over all."""
    largest = max(low, key=lambda entry: entry.shape[0] * entry.shape[1])
    (x,) = checkpoint.tensors((largest,))

    def one(way: Peer) -> float:
        return min(seconds(lambda: way.quantize(x.to(way.dtype))) for _ in range(2))

    chosen = sorted(ways, key=one)[:2]
    return min(chosen, key=lambda way: seconds(lambda: checkpoint.theirs(way, low)), default=None)


def _alternate(
    say: Say,
    case: str,
    figure: str,
    size: float,
    both: tuple[Work, Work | None],
    label: str,
    repetitions: int,
) -> None:
    ours, theirs = both
    mine, peer = [], []
    for _ in range(repetitions):
        mine.append(seconds(ours))
        peer += [] if theirs is None else [seconds(theirs)]
    say.time(case, figure, [size / took for took in mine], "GB/s")
    if peer:
        ratios = [their / our for their, our in zip(peer, mine, strict=True)]
        say.ratio(case, f"{figure} over the fastest peer", ratios, label)
        say.time(case, f"{figure}, fastest peer", [size / took for took in peer], "GB/s")


def seconds(work: Work) -> float:
    """CPU seconds of the process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def _weight(low: tuple[PlanEntry, ...]) -> int:
    return sum(2 * entry.shape[0] * entry.shape[1] for entry in low)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=tuple(SIZES), default=scaled.LARGE.name)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--formats", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts there")
    asked = parser.parse_args()
    facts, started = machine(), time.monotonic()
    found = measure(SIZES[asked.size], asked.repetitions, tuple(asked.formats))
    print(table(found))
    if asked.json is not None:
        told = document(found, facts, asked.size != scaled.LARGE.name, time.monotonic() - started)
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")

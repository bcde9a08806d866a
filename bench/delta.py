"""Deltas between consecutive versions of a real run: what changes, what a delta weighs, what it costs to make and use.

Trainer and rollout run in lock-step in this process (`syncline.lab`): tiny MoE, made wider, from random weights
N(0, 0.02) on, 64 trajectories of at most 6 tokens per update, Adam without warm-up. The last pairs of consecutive
versions are measured, tensor by tensor as they lie in the store. A tensor that did not change costs nothing; one whose
delta would not be smaller counts as sent whole. `delta_pull.py` has workers pull them.

Changed shares are of codes (a nibble is one where codes have 4 bits), scales, and wide values. Times are CPU seconds
of all changed tensors, one thread, with the digests given that sync and a worker have already; `apply` hashes what it
made. A copy is one of each tensor, into memory that this process has had before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import delta_pull
import msgspec
import numpy as np
import torch
from delta_pull import Kept
from rows import MODELS, Row, Say, note, table

from syncline.contract.job import JobSpec
from syncline.contract.version_path import TensorEntry
from syncline.lab.pair import KEY, Pair
from syncline.runtime.delta import GRAIN, WORDS, apply, encode
from syncline.runtime.store import BlobStore

COMMAND = "python bench/delta.py"
RECIPES = ("bf16", "unified_fp8", "int4_qat_w4a16", "mxfp8", "mxfp4_qat_w4a16", "nvfp4_w4a4")
SHORT = ("bf16",)
MODEL = "tiny-moe"
MEMORY = Path("/dev/shm")
PUBLISHED = "published for BF16: 0.0025 to 0.04"
PAIRS = 3  # consecutive versions, from the run's end
T = TypeVar("T")


class Changed(msgspec.Struct, frozen=True):
    """A tensor of two consecutive versions that is not the same in both."""

    entry: TensorEntry
    old: bytes
    new: bytes
    digests: tuple[str, str]


class Counts(msgspec.Struct, kw_only=True):
    """Sums over the tensors of some versions. Elements by role."""

    nbytes: int = 0
    unchanged: int = 0  # bytes of tensors that did not change
    elements: dict[str, int] = msgspec.field(default_factory=dict)
    changed: dict[str, int] = msgspec.field(default_factory=dict)


def measure(
    recipes: Sequence[str], rates: Sequence[float], wider: int, updates: int, repetitions: int
) -> list[Row]:
    """The rows of this part: one run per recipe and learning rate, `updates` (at least 2) long."""
    say = Say("delta", COMMAND)
    for rate in rates:
        for recipe in recipes:
            note(f"delta: {recipe} at {rate:g}")
            tell(say, f"{recipe} at lr {rate:g}", versions(recipe, rate, wider, updates), repetitions)
    return say.rows


def tell(say: Say, case: str, kept: Sequence[Kept], repetitions: int) -> None:
    """One run's rows."""
    counts, changed = compared(kept)
    for role, count in sorted(counts.elements.items()):
        whole = f"{role}; {PUBLISHED}" if role == "wide" else role
        say.share(case, f"changed share, {role}", counts.changed[role] / count, whole)
    say.share(case, "unchanged tensors", counts.unchanged / counts.nbytes, "bytes of the versions")
    weigh(say, case, counts, changed, repetitions)
    with scratch() as folder:
        delta_pull.tell(say, case, kept, KEY, folder, repetitions)


def weigh(say: Say, case: str, counts: Counts, changed: Sequence[Changed], repetitions: int) -> None:
    """What deltas of the changed tensors weigh and cost. Every pass keeps all that it makes, as staging does."""
    encoding, deltas = timed(
        lambda: [encode(c.old, c.new, GRAIN[c.entry.dtype], c.digests) for c in changed], repetitions
    )
    sent = sum(
        len(c.new) if made is None else len(made.data) for c, made in zip(changed, deltas, strict=True)
    )
    say.share(case, "delta", sent / counts.nbytes, "bytes of the versions")
    pairs = [(c, made.data) for c, made in zip(changed, deltas, strict=True) if made is not None]
    applying, applied = timed(lambda: [apply(c.old, data, c.digests[0]) for c, data in pairs], repetitions)
    for (c, _), got in zip(pairs, applied, strict=True):
        if got != c.new:
            raise AssertionError(f"tensor {c.entry.name}: the delta makes other bytes")
    copying, _ = timed(lambda: [bytearray(c.new) for c in changed], repetitions)
    hashing, _ = timed(lambda: [hashlib.sha256(c.new).digest() for c in changed], repetitions)
    for what, seconds in (("encode", encoding), ("apply", applying)):
        say.ratio(case, f"CPU, {what} over copy", [seconds / copying], "a copy of the changed tensors")
        say.ratio(case, f"CPU, {what} over sha256", [seconds / hashing], "sha256 of the changed tensors")


def versions(recipe: str, rate: float, wider: int, updates: int) -> list[Kept]:
    """The last versions of a run, oldest first."""
    with scratch() as folder:
        pair = Pair(spec(recipe, rate, updates), widened(folder, wider), folder / "pair")
        store = BlobStore(folder / "pair" / "store")
        kept: list[Kept] = []
        for update in range(updates + 1):
            manifest = pair.publish()
            if update >= updates - PAIRS:
                tensors = {e.name: (e, bytes(store.read(e.digest))) for e in manifest.tensors}
                kept.append(Kept(store.read_manifest(manifest.version), tensors))
            if update < updates:
                records = pair.sample(range(8 * update, 8 * update + 8), 8)
                pair.train(records, pair.rewards(records))
        return kept


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory, where there is one."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as made:
        yield Path(made)


def spec(recipe: str, rate: float, updates: int) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": f"delta-{recipe}",
            "model": {"name": MODEL},
            "task": {
                "environment": "characters",
                "options": {"game": "kind", "length": 6, "alphabet": "ab12"},
            },
            "sampling": {"max_tokens": 6},
            "batch": {"groups": 8, "group_size": 8},
            "optimizer": {"lr": rate},
            "loss": {"entropy": 0.03},
            "schedule": {"updates": updates, "max_lag": 1},
            "precision": {"recipe": recipe},
        }
    )


def widened(folder: Path, wider: int) -> Path:
    """A model root with tiny MoE, `wider` times as wide and with weights as small as a real model's."""
    shutil.copytree(MODELS / MODEL, folder / "models" / MODEL)
    path = folder / "models" / MODEL / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    for key in ("hidden_size", "head_dim", "moe_intermediate_size"):
        config[key] *= wider
    config["initializer_range"] = 0.02
    path.write_text(json.dumps(config))
    return folder / "models"


def compared(kept: Sequence[Kept]) -> tuple[Counts, list[Changed]]:
    """All pairs of consecutive versions: what is in them, and what changed."""
    counts, found = Counts(), []
    for before, after in pairwise(kept):
        for name, (entry, new) in after.tensors.items():
            was, old = before.tensors[name]
            role = role_of(entry)
            count, changed = counted(entry, old, new, role)
            counts.elements[role] = counts.elements.get(role, 0) + count
            counts.changed[role] = counts.changed.get(role, 0) + changed
            counts.nbytes += len(new)
            if was.digest == entry.digest:
                counts.unchanged += len(new)
            else:
                found.append(Changed(entry, old, new, (was.digest, entry.digest)))
    return counts, found


def role_of(entry: TensorEntry) -> str:
    """What the tensor holds, from its name as `contract/artefact.py` makes it."""
    if "_scale" in entry.name:
        return "scales"
    return "wide" if entry.dtype == "BF16" else "codes"


def counted(entry: TensorEntry, old: bytes, new: bytes, role: str) -> tuple[int, int]:
    """Elements of a tensor, and how many of them differ. Two codes lie in a byte of U8 and I32."""
    if role == "codes" and entry.dtype in ("U8", "I32"):
        xor = np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)
        return 2 * len(xor), int(np.count_nonzero(xor & 15)) + int(np.count_nonzero(xor >> 4))
    words = WORDS[4 if entry.dtype == "I32" else GRAIN[entry.dtype]]
    a, b = np.frombuffer(old, words), np.frombuffer(new, words)
    return len(b), int(np.count_nonzero(a != b))


def timed(work: Callable[[], T], repetitions: int) -> tuple[float, T]:
    """CPU seconds of the fastest of some runs, and what the last one returned."""
    seconds = []
    for _ in range(repetitions):
        began = time.process_time()
        done = work()
        seconds.append(time.process_time() - began)
    return min(seconds), done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6], help="learning rates (default: 1e-6)")
    parser.add_argument("--wider", type=int, default=4, help="times as wide as tiny MoE (default: 4)")
    parser.add_argument("--updates", type=int, default=5, help="updates of each run (default: 5)")
    parser.add_argument("--recipe", choices=RECIPES, nargs="+", default=RECIPES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(table(measure(given.recipe, given.lr, given.wider, given.updates, repetitions=3)))

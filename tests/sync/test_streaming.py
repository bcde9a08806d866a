"""Conversion holds one tensor at a time, whatever the model's size, and its threads change no byte."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import write
from shard_exports import config_of, write_shards
from sharded import Full, model

from syncline.contract.recipes import RECIPES
from syncline.contract.sharding.grid import Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.runtime.store import BlobStore
from syncline.sync.convert import convert
from syncline.sync.export import BadExport, Export
from syncline.sync.work import Job, Pool

ONE = Dimensions(layers=1, heads=4, kv_heads=2)
MIB = 1 << 20


def large() -> Full:
    """FP32, 3 x 64 MiB and a few small ones."""
    rng = np.random.default_rng(0)
    shapes = model(ONE, vocab=64, width=128, ffn=8192, hidden=2048)
    return {name: rng.random(shape, "f4") / 10 - 0.05 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    full = large()
    layout = Layout(engine="megatron_local", grid=Grid(tp=2), model=ONE)
    for kind in ("whole", "shards"):
        (root / kind).mkdir()
        if kind == "whole":
            files = write(root / kind / "e", dict(full), config_of(ONE))
        else:
            files = write_shards(root / kind / "e", full, layout, "F32")
        (root / kind / "files.json").write_text(json.dumps(files))
    return root


def measured(folder: Path, scheme: str, threads: int) -> dict[str, Any]:
    words = (str(Path(__file__).with_name("peak_memory.py")), str(folder), scheme, str(threads))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=180, check=True, env=env
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4"])
def test_memory_is_at_most_two_of_the_largest_tensors(exports: Path, scheme: str) -> None:
    """Of a process of its own, beyond mapped files; nvfp4 reads tensors twice, for scales that they share."""
    told = [
        measured(exports / kind / "e", scheme, threads)
        for kind, threads in (("whole", 1), ("shards", 1), ("shards", 2))
    ]
    for one in told:
        assert one["largest"] == 64 * MIB
        assert one["total"] > 3 * one["largest"]
        assert one["extra"] < 2 * one["largest"], told
    assert told[0]["extra"] < told[0]["largest"], "nothing of a whole export is copied"
    assert told[1]["extra"] > told[1]["largest"], "a gathered tensor is a copy: the measurement sees it"
    assert len({one["tensors"] for one in told}) == 1


def test_threads_change_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    parts: dict[str, Any] = {
        name: rng.standard_normal(shape).astype("<f4") for name, shape in model(ONE).items()
    }
    parts["model.twin.weight"] = parts["model.norm.weight"]  # equal bytes: new once, whoever comes first
    export = Export(tmp_path / "e", write(tmp_path / "e", parts, config_of(ONE)))
    done = [
        convert(export, RECIPES["bf16"], BlobStore(tmp_path / str(threads)), threads=threads)
        for threads in (1, 2, 5)
    ]
    assert done[0] == done[1] == done[2]
    assert done[0].new_bytes == sum({t.digest: t.nbytes for t in done[0].tensors}.values()) < done[0].nbytes
    export.close()


def test_the_first_of_several_errors_is_told(tmp_path: Path) -> None:
    """In the order of names, however many threads find one."""
    parts: dict[str, Any] = {
        f"w{i}": np.zeros(4, "<f8") if i in (3, 6) else np.ones(4, "<f4") for i in range(9)
    }
    export = Export(tmp_path / "e", write(tmp_path / "e", parts, {"tie_word_embeddings": False}))
    for threads in (1, 2, 4):
        with pytest.raises(BadExport, match="tensor w3 has dtype F64"):
            convert(export, RECIPES["bf16"], BlobStore(tmp_path / "store"), threads=threads)
    export.close()


def test_jobs_that_run_at_once_stay_within_the_limit() -> None:
    """Two that fit together meet; of many that hash a while, those at work never cost more than they may."""
    meeting = threading.Barrier(2)
    assert sorted(Pool(2, 10).done([Job(5, lambda: meeting.wait(60))] * 2)) == [0, 1]
    costs = [5, 3, 3, 9, 1, 2, 6, 30, 2, 2, 2, 2]
    lock, running, most = threading.Lock(), [0], [0]

    def run(cost: int) -> int:
        with lock:
            running[0] += cost
            most[0] = max(most[0], running[0] if cost <= 10 else 0)
            assert cost <= 10 or running[0] == cost, "one that is too large runs alone"
        hashlib.sha256(bytes(MIB))  # other threads run meanwhile
        with lock:
            running[0] -= cost
        return cost

    jobs = [Job(cost, lambda cost=cost: run(cost)) for cost in costs * 5]  # type: ignore[misc]
    assert Pool(4, 10).done(jobs) == costs * 5
    assert 0 < most[0] <= 10

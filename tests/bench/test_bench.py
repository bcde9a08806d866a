"""The bench's short form: every part runs, every row is whole. How large a figure is, no test says."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "loop.py"
KEYS = {"part", "case", "figure", "kind", "value", "unit", "low", "high", "against", "command"}
FACTS = {"cores", "usable_cores", "cpu", "memory_bytes", "torch_threads", "load_before", "python", "kernel"}
FACTS |= {"commit", "changed_files", "packages"}
MUST = {  # what later work compares: part, figure
    ("train_step", "tokens per CPU second, score and train step, engine over plain"),
    ("engine", "tokens per CPU second, engine over generate"),
    ("engine", "tokens per CPU second, engine over continuous"),
    ("stream", "CPU per trajectory, publish + consume over floor"),
    ("stream", "CPU per trajectory, whole way over floor"),
    ("quantizers", "copy"),
    ("quantizers", "quantize"),
    ("quantizers", "dequantize"),
    ("delta", "changed share, wide"),
    ("delta", "delta"),
    ("delta", "CPU, encode over sha256"),
    ("delta", "CPU, apply over sha256"),
    ("delta", "bytes pulled over HTTP, deltas over full"),
    ("delta", "seconds of a pull over HTTP, deltas over full"),
    ("activation", "bytes per second, stage over copy"),
    ("activation", "bytes per second, publish and stage over broadcast"),
    ("activation", "CPU, stage over copy"),
    ("activation", "gap at commit over decode step, continue_old"),
    ("activation", "longest gap over longest of as many steps"),
    ("activation", "gaps more than 10 ms beyond the median step"),
    ("activation", "steps more than 10 ms beyond the median step"),
    ("activation", "page faults of the commit, continue_old"),
    ("conversion", "conversion"),
    ("conversion", "conversion with writing"),
    ("growth", "CPU per trajectory over that of a small job"),
    ("gateway growth", "p99"),
    ("run", "tokens per second, all workers"),
    ("run", "step"),
    ("run", "sync pause, mean"),
    ("run", "sync pause, longest"),
    ("run", "minted to active"),
    ("run", "trajectories per second"),
    ("run", "idle share of rollout in sample"),
    ("run", "idle share of rollout in flow"),
    ("run", "idle share of trainer in train"),
    ("run", "idle share of trainer in flow"),
    ("run", "hand-over"),
    ("run", "share of cycle, hand-over"),
    ("run", "share of CPU, redis"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of a short run."""
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    env = {key: value for key, value in os.environ.items() if key != "SYNCLINE_STRICT"}
    argv = [sys.executable, str(BENCH), "--short", "--json", str(path)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "hand-over" in done.stdout, "the table goes to stdout"
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_a_short_run_gives_every_figure_that_later_work_compares(made: dict[str, Any]) -> None:
    assert made["short"] is True
    assert set(made["machine"]) == FACTS
    assert made["machine"]["torch_threads"] == 1
    assert {(row["part"], row["figure"]) for row in made["rows"]} >= MUST
    kinds = [row["kind"] for row in made["rows"]]
    assert kinds == sorted(kinds, key=["ratio", "count", "time"].index), "ratios, then counts, then times"
    names = [(row["part"], row["case"], row["figure"]) for row in made["rows"]]
    assert len(set(names)) == len(names), "a later run could not tell two rows apart"


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_every_row_is_whole_and_positive(made: dict[str, Any]) -> None:
    for row in made["rows"]:
        assert set(row) == KEYS, row
        assert row["command"].startswith(f"python bench/{BENCH_FILES[row['part']]}"), row
        assert (BENCH.parent / BENCH_FILES[row["part"]]).is_file()
        assert math.isfinite(row["value"]), row
        if row["kind"] == "ratio":
            assert row["against"], row
        if row["unit"] == "" or row["unit"] == "nats" or row["figure"] == "largest lag":
            assert 0 <= row["value"] <= 1, row  # shares of a whole; lag 0 is what colocated mode has
        elif row["unit"] == "page faults":
            assert row["value"] >= 0, row  # none is what a commit should have
        else:
            assert row["value"] > 0, row
        if row["low"] is not None:
            assert row["low"] <= row["value"] <= row["high"], row


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_the_parts_of_the_hand_over_make_the_whole(made: dict[str, Any]) -> None:
    shares: dict[str, list[float]] = defaultdict(list)
    for row in made["rows"]:
        if row["kind"] == "ratio" and row["figure"].startswith("share of hand-over, "):
            shares[row["case"]].append(row["value"])
    assert list(shares) == ["tiny-moe switching"]
    for case, parts in shares.items():
        assert sum(parts) == pytest.approx(1.0, abs=1e-6), case


BENCH_FILES = {
    "activation": "activation.py",
    "conversion": "conversion.py",
    "growth": "growth.py",
    "gateway growth": "gateway_growth.py",
    "engine": "engine.py",
    "stream": "stream_cost.py",
    "quantizers": "quantizers.py",
    "delta": "delta.py",
    "run": "run_figures.py",
    "train_step": "train_step.py",
}

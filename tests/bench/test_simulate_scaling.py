"""The pool's policy on a simulated fleet: the real machine and lag bound, among engines that take time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from syncline.scheduler.scaling import STARVED

SCRIPT = Path(__file__).parents[2] / "bench" / "sim_scaling.py"


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    """What the script says of each of its runs, by name."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return {run["name"]: run for run in json.loads(done.stdout)}


def test_a_starved_trainer_gets_workers_and_a_saturated_one_gives_them_back(
    runs: dict[str, dict[str, Any]],
) -> None:
    """Training takes 20 s, and from update 60 on three times as long."""
    run = runs["1 to 8 workers, slower training from update 60"]
    sizes = [size["workers"] for size in run["sizes"]]
    grown = max(sizes)
    assert sizes[: grown - 1] == list(range(2, grown + 1)), sizes
    assert grown in (4, 5, 6), sizes
    assert sizes[-1] in (2, 3), sizes
    assert run["turns"] == 1, "it turns once, as the load did"
    assert run["largest_lag"] <= 2
    assert run["updates"] == 160


def test_scaling_pays(runs: dict[str, dict[str, Any]]) -> None:
    """Against the two workers that it began with."""
    scaled, fixed = runs["1 to 8 workers"], runs["2 workers"]
    assert len(fixed["sizes"]) == 1
    assert scaled["turns"] == 0
    assert scaled["step"] < 0.7 * fixed["step"]
    assert scaled["step"] < 20 / (1 - STARVED), (
        "what is left of waiting is less than calls for another worker"
    )

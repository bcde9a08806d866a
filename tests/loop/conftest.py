"""A whole stack per test, with the logs shown when a test fails."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import Stack


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    started = Stack(runs)
    try:
        started.up()
        yield started
    finally:
        started.down()
        shutil.rmtree(runs, ignore_errors=True)

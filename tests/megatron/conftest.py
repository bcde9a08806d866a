"""What marks the suites that need megatron-core, and a whole stack per test, as the loop's own tests have it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import Stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.megatron)


@pytest.fixture
def stack() -> Iterator[Stack]:
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    started = Stack(runs)
    try:
        started.up()
        yield started
    finally:
        started.down()
        shutil.rmtree(runs, ignore_errors=True)

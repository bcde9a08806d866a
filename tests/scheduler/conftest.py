"""A scheduler process with what surrounds it, one per test file that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from installation import Installation


@pytest.fixture(scope="module")
def installation(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    made = Installation(redis_url, tmp_path_factory.mktemp("runs"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def here(installation: Installation) -> Iterator[Installation]:
    """The file's installation; what the test submitted has ended afterwards."""
    yield installation
    installation.end_jobs()

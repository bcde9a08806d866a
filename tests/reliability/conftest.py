"""A job of its own per test, on the shared server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from field import Field, spec_of


@pytest.fixture
def field_of(redis_url: str, job: str, tmp_path: Path) -> Iterator[Callable[..., Field]]:
    made: list[Field] = []

    def make(url: str = redis_url, deadline: float = 20.0, **parts: Any) -> Field:
        made.append(Field(url, job, tmp_path, spec_of(**parts), deadline))
        return made[-1]

    yield make
    for one in made:
        one.close()

"""Fixtures of the suite: one installation for the session, and one apart with a run root of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from security_world import OPERATOR, Installation

from syncline.runtime.settings import Settings


@pytest.fixture(scope="session")
def base(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with a model `tiny`, in a database that no other suite uses."""
    models = tmp_path_factory.mktemp("models")
    (models / "tiny").mkdir()
    (models / "tiny" / "config.json").write_text("{}")
    return Settings.read(
        {
            "SYNCLINE_REDIS_URL": f"{redis_url}?db=8",
            "SYNCLINE_MODELS": str(models),
            "SYNCLINE_RUNS": str(tmp_path_factory.mktemp("runs")),
            "SYNCLINE_TOKEN": OPERATOR,
        }
    )


@pytest.fixture(scope="session")
def house(base: Settings) -> Iterator[Installation]:
    made = Installation(base)
    yield made
    made.stop()


@pytest.fixture
def apart(base: Settings, tmp_path: Path) -> Iterator[Installation]:
    """Another installation, with a run root of its own on the same Redis."""
    made = Installation(msgspec.structs.replace(base, runs=tmp_path / "runs"))
    yield made
    made.stop()

"""A real gateway on a real Redis: uvicorn in a thread, a model root and a run root of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from serving import Server

from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings


@pytest.fixture(scope="session")
def own_redis(redis_url: str) -> str:
    """A database of the session's server that no other suite uses."""
    return f"{redis_url}?db=7"


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `tiny` and `tiny-moe` (of 1024 positions); `way-out` is a link that leads out, `empty` has no config."""
    outside = tmp_path_factory.mktemp("outside")
    root = tmp_path_factory.mktemp("models")
    for folder in (outside / "way-out", root / "tiny", root / "tiny-moe"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (root / "tiny-moe" / "config.json").write_text('{"max_position_embeddings": 1024}')
    (root / "way-out").symlink_to(outside / "way-out")
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="session")
def settings(own_redis: str, model_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings.read(
        {
            "SYNCLINE_REDIS_URL": own_redis,
            "SYNCLINE_MODELS": str(model_root),
            "SYNCLINE_RUNS": str(tmp_path_factory.mktemp("runs")),
        }
    )


@pytest.fixture(scope="session")
def server(settings: Settings) -> Iterator[Server]:
    bus = Bus(settings.redis_url, deadline=5)
    found = Server(settings, bus)
    yield found
    found.stop()
    bus.close()


@pytest.fixture
def another(settings: Settings) -> Iterator[Callable[..., Server]]:
    """Makes gateways with settings changed."""
    made: list[Server] = []

    def make(**changes: Any) -> Server:
        changed = msgspec.structs.replace(settings, **changes)
        made.append(Server(changed, Bus(changed.redis_url, deadline=0.3)))
        return made[-1]

    yield make
    for one in made:
        one.stop()
        one.bus.close()

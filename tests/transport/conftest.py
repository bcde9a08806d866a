"""A rig per kind; `objects` on the disk, and on a real S3 endpoint over HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer
from transport_rig import Rig


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Address of an S3 endpoint on this machine."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket, with access to it in the environment as a user gives it."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3,
    }.items():
        monkeypatch.setenv(name, value)

    name = f"b{secrets.token_hex(4)}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/versions"


MOVING = ["http", "group", "file", "s3"]


@pytest.fixture(params=MOVING)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """Each way in which bytes move."""
    match request.param:
        case "s3":
            made = Rig(tmp_path, "objects", url=request.getfixturevalue("bucket"))
        case "file":
            made = Rig(tmp_path, "objects", url=f"file://{tmp_path / 'far'}")
        case kind:
            made = Rig(tmp_path, kind)
    yield made
    made.close()

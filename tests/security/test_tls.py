"""TLS from mounted files: a gateway process, and the commands of its machine, which trust no other."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from certificates import certificate
from waiting import wait_until

from syncline.runtime.settings import Settings
from syncline.scheduler.client import Client, Unreachable


@pytest.fixture(scope="module")
def tls(base: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, str]]:
    """Settings and URL of a gateway process with a certificate for `syncline.example.org`."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = certificate(folder, "syncline.example.org")
    settings = msgspec.structs.replace(base, runs=folder / "runs", tls_cert=cert, tls_key=key)
    env = settings.inherited(os.environ) | {"SYNCLINE_PORT": "0", "SYNCLINE_TOKEN": str(base.token)}
    process = subprocess.Popen([sys.executable, "-m", "syncline.gateway"], env=env)
    try:
        told = settings.runs / "gateway.json"
        wait_until(told.exists, 60, "a gateway that says where it is")
        yield settings, json.loads(told.read_bytes())["url"]
    finally:
        process.terminate()
        process.wait(30)


def test_it_speaks_tls_and_nothing_else(tls: tuple[Settings, str]) -> None:
    settings, url = tls
    assert url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=str(settings.tls_cert))
    context.check_hostname = False
    wait_until(lambda: httpx.get(f"{url}/healthz", verify=context).status_code == 200, 30, "an answer")
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/healthz")


def test_commands_trust_the_gateways_own_certificate_alone(tls: tuple[Settings, str], tmp_path: Path) -> None:
    settings, url = tls
    trusting = Client(url, settings.token, trusted=settings.tls_cert)
    assert trusting.get("/v1/jobs")["items"] is not None
    trusting.close()
    for trusted in (None, certificate(tmp_path, "syncline.example.org")[0]):
        client = Client(url, settings.token, trusted=trusted)
        with pytest.raises(Unreachable, match="certificate"):
            client.get("/v1/jobs")
        client.close()


def test_one_file_without_the_other_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SYNCLINE_TLS_KEY"):
        Settings.read({"SYNCLINE_TLS_CERT": "x.pem"})
    with pytest.raises(ValueError, match="SYNCLINE_TLS_CERT"):
        Client("https://127.0.0.1:1", trusted=tmp_path / "none.pem")

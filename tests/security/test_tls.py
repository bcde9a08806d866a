"""TLS from mounted files: a gateway process, and the commands of its machine, which trust no other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from certificates import certificate
from cryptography import x509
from cryptography.x509.oid import NameOID
from waiting import wait_until

from syncline.gateway.certificate import keep_certificate
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


@contextmanager
def shown_by(served: ssl.SSLContext) -> Iterator[Callable[[], str]]:
    """A server with this context on a socket; what it shows in a handshake, as its certificate's common name."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    raw, _ = listener.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), served.wrap_socket(raw, server_side=True) as one:
                    one.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()

        def name() -> str:
            pem = ssl.get_server_certificate(listener.getsockname(), timeout=5)
            subject = x509.load_pem_x509_certificate(pem.encode()).subject
            return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)

        yield name
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a kubelet renews: both files appear at once, behind one link. A pair that does not fit changes nothing."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for made, kind in zip(
            certificate(tmp_path / name, f"{name}.example.org"), ("crt", "key"), strict=True
        ):
            made.rename(tmp_path / name / f"tls.{kind}")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "tls.crt").write_bytes((tmp_path / "new" / "tls.crt").read_bytes())
    (tmp_path / "torn" / "tls.key").write_bytes((tmp_path / "old" / "tls.key").read_bytes())

    def mount(name: str) -> None:
        (tmp_path / "next").symlink_to(tmp_path / name)
        (tmp_path / "next").replace(tmp_path / "data")

    mount("old")
    cert, key = tmp_path / "data" / "tls.crt", tmp_path / "data" / "tls.key"
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(cert, key)
    stopping = threading.Event()
    keeper = threading.Thread(target=keep_certificate, args=(served, cert, key, stopping, 0.01), daemon=True)
    with shown_by(served) as shown, caplog.at_level("WARNING", "syncline.gateway"):
        keeper.start()
        assert shown() == "old.example.org"
        mount("torn")
        wait_until(lambda: "cannot be read" in caplog.text, 10, "the torn pair is seen")
        assert shown() == "old.example.org"
        mount("new")
        wait_until(lambda: shown() == "new.example.org", 10, "the new one is shown")
        (tmp_path / "data").unlink()  # nothing is there: the last one stays
        assert shown() == "new.example.org"
        stopping.set()
        keeper.join(10)
    assert not keeper.is_alive()
    assert caplog.text.count("cannot be read") == 1


def test_a_gateway_keeps_its_certificate(tls: tuple[Settings, str], base: Settings) -> None:
    """The process does: the thread is there only where it speaks TLS."""
    settings, url = tls
    assert settings.tls_cert is not None
    _, _, port = url.rpartition(":")
    name = "renewed.example.org"
    made = certificate(settings.tls_cert.parent, name)
    for fresh, mounted in zip(made, (settings.tls_cert, settings.tls_key), strict=True):
        assert mounted is not None
        fresh.replace(mounted)

    def renewed() -> bool:
        pem = ssl.get_server_certificate(("127.0.0.1", int(port)), timeout=5)
        return pem.encode() == settings.tls_cert.read_bytes() if settings.tls_cert else False

    wait_until(renewed, 40, "the gateway shows the renewed certificate", every=0.2)


def test_one_file_without_the_other_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SYNCLINE_TLS_KEY"):
        Settings.read({"SYNCLINE_TLS_CERT": "x.pem"})
    with pytest.raises(ValueError, match="SYNCLINE_TLS_CERT"):
        Client("https://127.0.0.1:1", trusted=tmp_path / "none.pem")

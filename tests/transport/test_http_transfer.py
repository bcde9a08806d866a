"""Kind `http` on the wire: who is let in, what has a name, and connections that break or fall silent."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from transport_rig import KEY, TOTAL, Rig, content
from waiting import wait_until

from syncline.contract.version_path import VersionId
from syncline.transport.http import token
from syncline.transport.transport import NotOffered, Superseded, Unreachable


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, "http")
    yield made
    made.close()


def get(
    rig: Rig, path: str, method: str = "GET", bearer: str | None = None, span: str | None = None
) -> tuple[int, bytes]:
    url = urlsplit(rig.offering.source(VersionId(0, 0), ("w0",), 0))
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
    headers = {"authorization": f"Bearer {token(KEY) if bearer is None else bearer}"}
    connection.request(method, path, headers=headers | ({"range": span} if span else {}))
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_only_the_jobs_token_opens(web: Rig) -> None:
    web.publish(0)
    assert get(web, "/manifests/0.0")[0] == 200
    for bearer in ("", "x", token(KEY)[:-1], token(KEY) + "0", token(b"another key"), KEY.decode()):
        assert get(web, "/manifests/0.0", bearer=bearer) == (401, b"")
    assert KEY.hex() not in token(KEY)


def test_a_worker_of_another_job_is_told_so(web: Rig) -> None:
    manifest = web.publish(0)
    web.offering.close()
    web.folder.joinpath("foreign").mkdir()
    foreign = Rig(web.folder / "foreign", "http")
    foreign.publish(0)
    foreign.offering._server.authorization = f"Bearer {token(b'another key')}"  # type: ignore[attr-defined]
    with pytest.raises(NotOffered, match="does not take the job's token"):
        web.puller().pull(web.order(manifest, source=foreign.offering.source(VersionId(0, 0), (), 0)), None)
    foreign.close()
    web.offered()


def test_what_no_live_manifest_names_is_not_there(web: Rig) -> None:
    manifest = web.publish(0)
    digest = next(entry.digest for entry in manifest.tensors if entry.name == "norm")
    assert get(web, f"/blobs/{digest}") == (206, content("norm", 0))
    loose = web.store.put(b"a blob of a version that is being converted")
    assert get(web, f"/blobs/{loose}")[0] == 404
    for path in (
        "/",
        "/key",
        "/blobs/",
        "/blobs/../../key",
        f"/blobs/{digest}/..",
        f"/blobs/{digest.upper()}",
        f"/blobs/%2e%2e/{digest}",
        "/manifests/../key",
        "/manifests/0.1",
        "/manifests/x",
        "/deltas/0.0.json",
        "/deltas/../manifests/0.0.json",
        "/../store/manifests/0.0.json",
    ):
        assert get(web, path)[0] == 404, path
    web.store.collect(set())
    assert get(web, f"/blobs/{digest}")[0] == 404
    assert get(web, "/manifests/0.0")[0] == 404
    assert get(web, f"/blobs/{digest}", method="POST")[0] == 501


def test_ranges(web: Rig) -> None:
    manifest = web.publish(0)
    path = "/blobs/" + next(entry.digest for entry in manifest.tensors if entry.name == "norm")
    raw = content("norm", 0)
    assert get(web, path, span="bytes=0-0") == (206, raw[:1])
    assert get(web, path, span="bytes=10-19") == (206, raw[10:20])
    assert get(web, path, span="bytes=60-1000") == (206, raw[60:])
    for span in (
        "bytes=64-70",
        "bytes=5-4",
        "bytes=-5",
        "bytes=5-",
        "bytes=0-1,3-4",
        "lines=1-2",
        "bytes=a-b",
    ):
        assert get(web, path, span=span)[0] == 416, span


class Cutting:
    """A way to the server that is cut after so many bytes of answers, connection by connection."""

    def __init__(self, target: str, allowances: list[int]) -> None:
        self._target, self._allowances = urlsplit(target), allowances
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.passed: list[int] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def source(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            allowance = self._allowances.pop(0) if self._allowances else 1 << 40
            threading.Thread(target=self._pass, args=(near, allowance), daemon=True).start()

    def _pass(self, near: socket.socket, allowance: int) -> None:
        with near, socket.create_connection((self._target.hostname, self._target.port)) as away:
            threading.Thread(target=self._questions, args=(near, away), daemon=True).start()
            done = 0
            while done < allowance and (data := away.recv(min(65536, allowance - done))):
                near.sendall(data)
                done += len(data)
            self.passed.append(done)
            near.shutdown(socket.SHUT_RDWR)

    def _questions(self, near: socket.socket, away: socket.socket) -> None:
        try:
            while data := near.recv(65536):
                away.sendall(data)
            away.shutdown(socket.SHUT_WR)
        except OSError:
            return  # cut

    def close(self) -> None:
        self._listener.close()


def test_a_cut_connection_goes_on_at_its_byte(web: Rig) -> None:
    manifest = web.publish(0)
    cuts = [400_000, 1_300_000, 70_000, 10, 0]
    way = Cutting(web.offering.source(manifest.version, ("w0",), 0), list(cuts))
    worker = web.puller()
    signed, pulled = worker.pull(web.order(manifest, source=way.source), None)
    assert signed == web.store.read_manifest(manifest.version)
    assert pulled.full == TOTAL
    worker.close()
    wait_until(lambda: len(way.passed) == len(cuts) + 1, 10, "the last connection is over")
    assert sum(way.passed) < TOTAL + 100_000, "no byte of a blob came twice, but for what lay in buffers"
    way.close()


def test_a_silent_server_is_given_up_at_once_when_a_newer_order_comes(web: Rig) -> None:
    manifest = web.publish(0)
    worker = web.puller()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        source = f"http://127.0.0.1:{silent.getsockname()[1]}"
        order = web.order(manifest, source=source)
        pull = pool.submit(worker.pull, order, None)
        asking, _ = silent.accept()
        assert asking.recv(10)
        began = time.monotonic()
        worker.supersede(order.seq + 1)
        with pytest.raises(Superseded):
            pull.result(10)
        assert time.monotonic() - began < 2
        asking.close()
    web.pull(worker, manifest)


def test_a_silent_server_ends_by_the_deadline(web: Rig) -> None:
    manifest = web.publish(0)
    worker = web.puller(timeout=1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(Unreachable, match=r"worker w0: .*not within 1 s: http://.*timed out"):
            worker.pull(web.order(manifest, source=source), None)
        assert time.monotonic() - began < 3
    web.pull(web.puller(), manifest)

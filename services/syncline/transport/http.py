"""Kind `http`: ranges of blobs from a server inside the sync process, with a token that the job's key gives.

Sync listens on a free port of `SYNCLINE_HOST` and says in each stage order where. A worker asks for at most
`transfer.bucket_mb` at once, over one connection that it keeps, and goes on at the byte where that broke.

The token keeps strangers out and nothing secret: it travels as it is, so the network between must be the job's own.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import logging
import os
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from syncline.contract.deltas import BadIndex
from syncline.contract.version_path import BadManifest, SignedManifest, VersionId
from syncline.runtime.store import BlobStore, MissingManifest
from syncline.transport.offered import Offered
from syncline.transport.transport import Deadline, Into, NotOffered, WrongLength

_LABEL = b"syncline transfer: bearer token"
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_TOTAL = re.compile(r"bytes [0-9]+-[0-9]+/([0-9]+)")
_STALL = 10.0  # seconds for one answer or read before the connection counts as broken
_IDLE = 60.0  # seconds that the server keeps a silent connection
_MOST = 64 << 20  # bytes of a manifest or an extra
_LOG = logging.getLogger("syncline.transport")


def token(key: bytes) -> str:
    """The bearer token of a job, from its key."""
    return hmac.new(key, _LABEL, hashlib.sha256).hexdigest()


# ---- sync
class HttpOffering:
    """A server over the job's store, in threads of this process."""

    def __init__(self, store: BlobStore, key: bytes, host: str) -> None:
        self._server = _Server((host, 0), _Handler)
        self._server.offered, self._server.authorization = Offered(store), f"Bearer {token(key)}"
        port = self._server.server_address[1]
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self._url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
        threading.Thread(target=self._server.serve_forever, name="transfer", daemon=True).start()

    def offer(self, version: VersionId) -> None:
        """The store is looked at with each request."""

    def source(self, version: VersionId, workers: tuple[str, ...], seq: int) -> str:
        return self._url

    def retire(self) -> None:
        """The store is looked at with each request."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    offered: Offered
    authorization: str

    def handle_error(self, request: object, client_address: object) -> None:
        """A worker that went away, mostly."""
        _LOG.info("transfer to %s ended: %s", client_address, sys.exception())


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _IDLE
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        given = self.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, self.server.authorization.encode()):
            self._end(401)
            return
        folder, _, name = self.path.lstrip("/").partition("/")
        try:
            match folder:
                case "blobs" if len(name) == 64 and set(name) <= set("0123456789abcdef"):
                    path = self.server.offered.blob(name)
                    self._end(404) if path is None else self._blob(path)
                case "manifests":
                    self._whole(self.server.offered.manifest(name))
                case "deltas":
                    self._whole(self.server.offered.extra(f"deltas/{name}"))
                case _:
                    self._end(404)
        except (MissingManifest, BadManifest, BadIndex, FileNotFoundError, msgspec.MsgspecError) as error:
            _LOG.info("not offered: %s", error)  # retired while it was asked for
            self._end(404)

    def _blob(self, path: Path) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            wanted = _RANGE.fullmatch(self.headers.get("range", f"bytes=0-{max(0, size - 1)}"))
            if wanted is None or not int(wanted[1]) <= int(wanted[2]) or int(wanted[1]) >= size:
                self._end(416, {"content-range": f"bytes */{size}"})
                return
            first, last = int(wanted[1]), min(int(wanted[2]), size - 1)
            self.send_response(206)
            self.send_header("content-length", str(last - first + 1))
            self.send_header("content-range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            self.connection.sendfile(file, first, last - first + 1)

    def _whole(self, body: bytes | None) -> None:
        if body is None:
            self._end(404)
            return
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _end(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"content-length": "0", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Workers ask for many ranges: they are no news."""


# ---- worker
class HttpFetch:
    """See `transport.Fetch`. One connection, kept; `bucket`: bytes of one request."""

    kind = "http"

    def __init__(self, key: bytes, bucket: int) -> None:
        self._headers = {"authorization": f"Bearer {token(key)}"}
        self._bucket = bucket
        self._buffer = memoryview(bytearray(min(bucket, 1 << 20)))
        self._source = ""
        self._connection: http.client.HTTPConnection | None = None

    def seek(self, source: str) -> None:
        if source != self._source:
            self.close()
            self._source = source

    def manifest(self, version: VersionId, until: Deadline) -> SignedManifest:
        body = self._whole(f"/manifests/{version}", until)
        try:
            return msgspec.json.decode(body, type=SignedManifest)
        except msgspec.MsgspecError as error:
            raise BadManifest(f"what {self._source} sends is no manifest: {error}") from None

    def extra(self, name: str, until: Deadline) -> bytes:
        return self._whole(f"/{name}", until)

    def blob(self, into: Into, until: Deadline) -> None:
        while into.held < into.nbytes:
            last = min(into.held + self._bucket, into.nbytes) - 1
            answer = self._ask(f"/blobs/{into.digest}", until, {"range": f"bytes={into.held}-{last}"})
            total = _TOTAL.fullmatch(answer.headers.get("content-range", ""))
            if answer.status not in (206, 416) or (answer.status == 206 and total is None):
                raise self._broken(f"answers {answer.status} to a range")
            if answer.status == 416 or (total is not None and int(total[1]) != into.nbytes):
                self.close()
                raise WrongLength(
                    f"blob {into.digest}: {self._source} has {answer.headers.get('content-range')}, "
                    f"the manifest says {into.nbytes} bytes"
                )
            self._read(answer, into, last + 1 - into.held, until)

    def done(self) -> None:
        """The server keeps nothing for anybody."""

    def interrupt(self) -> None:
        connection = self._connection
        if connection is not None and connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is down already

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ---- one request
    def _read(self, answer: http.client.HTTPResponse, into: Into, count: int, until: Deadline) -> None:
        while count:
            until.left()
            try:
                got = answer.readinto(self._buffer[: min(count, len(self._buffer))])
            except (OSError, http.client.HTTPException) as error:
                raise self._broken(str(error)) from error
            if got == 0:
                raise self._broken(f"ended {count} bytes before the end of a range")
            into.write(self._buffer[:got])
            count -= got

    def _whole(self, path: str, until: Deadline) -> bytes:
        answer = self._ask(path, until)
        length = int(answer.headers.get("content-length", "0"))
        try:
            body = answer.read(min(length, _MOST))
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(str(error)) from error
        if answer.status != 200 or len(body) != length:
            raise self._broken(f"answers {answer.status} with {len(body)} of {length} bytes")
        return body

    def _ask(
        self, path: str, until: Deadline, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """The answer's head. Raises `NotOffered`; `OSError` for everything that may go better next time."""
        if self._connection is None:
            url = urlsplit(self._source)
            self._connection = http.client.HTTPConnection(url.hostname or "", url.port)
        connection = self._connection
        try:
            connection.timeout = min(until.left(), _STALL)
            if connection.sock is not None:
                connection.sock.settimeout(connection.timeout)
            connection.request("GET", path, headers={**self._headers, **(headers or {})})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(str(error) or type(error).__name__) from error
        if answer.status in (401, 404):
            self.close()
            why = "does not take the job's token" if answer.status == 401 else "does not offer it"
            raise NotOffered(f"{path}: {self._source} {why}")
        return answer

    def _broken(self, why: str) -> ConnectionError:
        self.close()
        return ConnectionError(f"{self._source}: {why}")

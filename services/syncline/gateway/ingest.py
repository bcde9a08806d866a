"""`POST /v1/traces` on a port of its own: spans of other processes, by OTLP/HTTP, into the gateway's own store (0021).

Apart from the application: neither an ingress nor a user's token leads here, and its key opens nothing else. What is
stored is read through the doors that there are (`tempo.py`, lineage), under their rules. Off unless configured.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import uvicorn
from starlette.types import Receive, Scope, Send

from syncline.gateway import bodies
from syncline.gateway.numbers import NO_ROUTE, Numbers
from syncline.runtime.service import ServiceContext
from syncline.runtime.trace_store import TraceStore
from syncline.runtime.tracing_wire import export_answer, export_refusal, records_of

PATH = "/v1/traces"
MEDIA_TYPE = b"application/x-protobuf"
MOST_BYTES = 16 << 20  # of a request, before and after decompression
AT_ONCE = 16  # requests being read or written; more are told to come back
BODY_SECONDS = 30.0
_LOG = logging.getLogger(__name__)


class Refused(Exception):
    """A request that is not taken: status, and why."""

    def __init__(self, status: int, why: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(why)
        self.status, self.headers = status, headers


class Ingest:
    """ASGI application. A request is taken whole or not at all; one that is sent again changes nothing."""

    def __init__(self, store: Path, key: str, numbers: Numbers) -> None:
        self._path, self._key, self._numbers = store, key.encode(), numbers
        self._store: TraceStore | None = None
        self._writer = anyio.CapacityLimiter(1)  # the store's connection is for one thread at a time
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        extra: tuple[tuple[bytes, bytes], ...] = ((b"content-type", MEDIA_TYPE),)
        began, status, unread = time.perf_counter(), 200, True
        try:
            self._admit(scope)
            if self._inside >= AT_ONCE:
                raise Refused(503, f"{AT_ONCE} requests are being taken already", ((b"retry-after", b"1"),))
            self._inside += 1
            try:
                body = await bodies.whole(scope, receive, MOST_BYTES, BODY_SECONDS)
                unread = False
                gzipped = _header(scope, b"content-encoding") == b"gzip"
                await anyio.to_thread.run_sync(self._take, body, gzipped, limiter=self._writer)
            finally:
                self._inside -= 1
            said = export_answer()
        except Refused as refused:
            status, said, extra = refused.status, export_refusal(str(refused)), (*extra, *refused.headers)
        except bodies.NotRead as error:
            status, said = error.status, export_refusal(str(error))
        self._numbers.answered(
            scope["method"],
            PATH if scope["path"] == PATH else NO_ROUTE,
            status,
            time.perf_counter() - began,
        )
        headers = [(b"content-length", str(len(said)).encode()), *extra]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": said, "more_body": unread})
        if unread:
            await bodies.dropped(receive)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _admit(self, scope: Scope) -> None:
        """Raises `Refused` for what is no export of somebody who has the key. Nothing of the body is read before."""
        if scope["path"] != PATH:
            raise Refused(404, f"spans are taken at {PATH}, and nothing else is here")
        if scope["method"] != "POST":
            raise Refused(405, "spans come by POST", ((b"allow", b"POST"),))
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], b"Bearer " + self._key):
            raise Refused(401, "the key for spans is needed", ((b"www-authenticate", b"Bearer"),))
        if _header(scope, b"content-type") != MEDIA_TYPE:
            raise Refused(415, f"spans come as {MEDIA_TYPE.decode()}")
        if _header(scope, b"content-encoding") not in (b"", b"identity", b"gzip"):
            raise Refused(415, "content-encoding is gzip or none")

    def _take(self, body: bytes, gzipped: bool) -> None:
        """In a thread. Raises `Refused` for a bad body, and for a store that cannot be written now."""
        try:
            records = records_of(_unzipped(body) if gzipped else body)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        try:
            if self._store is None:
                self._store = TraceStore(self._path)
            self._store.write(records)
        except (sqlite3.Error, OSError) as error:
            self._store = None
            _LOG.warning("%d spans of another process not stored for now: %s", len(records), error)
            raise Refused(503, "the store cannot be written now", ((b"retry-after", b"2"),)) from None

    def close(self) -> None:
        """Close the store. No request may be running."""
        if self._store is not None:
            self._store.close()


@contextlib.contextmanager
def spans_taken(
    context: ServiceContext, numbers: Numbers, listening: Callable[[str, int], socket.socket]
) -> Iterator[None]:
    """Take spans in a thread meanwhile, if the settings name a port and a key."""
    settings = context.settings
    if settings.traces_port is None or settings.traces_key is None:
        yield
        return
    app = Ingest(settings.traces, settings.traces_key, numbers)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=60,  # a sender's connection outlives its silence
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    with listening(settings.host, settings.traces_port) as listener:
        context.log.info("taking spans on port %d", listener.getsockname()[1])
        thread = context.thread("spans", lambda: server.run(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()
            app.close()


def _unzipped(body: bytes) -> bytes:
    """Never more than the bound, whatever `body` would grow to."""
    reader = zlib.decompressobj(wbits=31)
    try:
        found = reader.decompress(body, MOST_BYTES + 1)
    except zlib.error:
        raise ValueError("the body is not gzip, as content-encoding says") from None
    if len(found) > MOST_BYTES:
        raise Refused(413, f"a request may have at most {MOST_BYTES} bytes, decompressed ones, too")
    if not reader.eof or reader.unused_data:
        raise ValueError("the body is not one whole gzip member")
    return found


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value.strip().lower() for key, value in scope["headers"] if key == name), b"")

"""The bus: Redis streams, keys and scripts, with reconnection. The only importer of redis.

Commands go out raw under RESP2 and replies are shaped in `commands.py`, so what a caller gets does not change
with the client library's version. A command whose connection breaks is sent again until the deadline: a plain
write may therefore happen twice (at least once); scripts of the ledger are idempotent for that reason. Entries
that a group read delivered into a broken connection stay pending until somebody takes them over.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import ExponentialBackoff

from syncline.runtime import resp
from syncline.runtime.commands import CommandRefused, Commands, Script
from syncline.runtime.messages import (
    BadMessage,
    Entry,
    Taken,
    Value,
    entries_of,
    id_order,
    pack,
    ranges_of,
    unpack,
)

__all__ = [
    "BadMessage",
    "Bus",
    "BusDown",
    "CommandRefused",
    "Entry",
    "Script",
    "ServerReplaced",
    "Taken",
    "UnsafeServer",
    "Value",
    "pack",
    "unpack",
]

_LOG = logging.getLogger(__name__)
_RETRIED = (  # a server that is LOADING is a ConnectionError too
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.OutOfMemoryError,
)
_SOCKET = (
    15.0  # seconds without a reply after which a connection is given up; more than a blocking read takes
)


AT_ONCE = 32  # entries that one round trip fetches: a record may have tens of kilobytes


class BusDown(Exception):
    """Redis could not be reached, or was full, until the deadline, or it will never let us in."""


class UnsafeServer(Exception):
    """A Redis that may drop data or is too old. The message names the setting and the right value."""


class ServerReplaced(Exception):
    """Another Redis process answers than before: it may have come back without what was written last."""


class Bus(Commands):
    """A connection pool to one Redis. Safe to share between threads, and across a fork.

    url        redis://, rediss:// or unix:// URL
    deadline   seconds for which an unreachable server is retried before `BusDown`
    """

    def __init__(self, url: str, deadline: float = 60.0) -> None:
        self.url = url
        self.deadline = deadline
        self.reconnects = 0  # commands sent again
        self.tombstones = 0
        self.groups_recreated = 0
        self._backoff = ExponentialBackoff(cap=2.0, base=0.1)
        self._closing = threading.Event()
        self._connected = 0  # connections made: the pool replaces closed ones without a word
        self._server, self._seen = "", -1  # whom we speak to, and `_connected` when that was asked
        self._pool = redis.ConnectionPool.from_url(
            url,
            protocol=2,
            decode_responses=False,
            socket_timeout=_SOCKET,
            socket_connect_timeout=5.0,
            retry=redis.retry.Retry(ExponentialBackoff(), 0),
            max_connections=4096,
            redis_connect_func=self._on_connect,
        )

    def call(self, *command: Value) -> Any:
        """One raw command; its raw RESP2 reply. Raises `CommandRefused` for an error reply, or `BusDown`."""
        return self.many([command])[0]

    def many(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """Raw commands in one round trip, not atomic; raw replies in order. Raises the first error reply."""
        return self._ask(resp.packed(commands), len(commands))

    def script(self, lua: str) -> Script:
        """A callable `(keys, args) -> raw reply`; atomic. The script may run twice and must be idempotent."""
        return lambda keys, args: self.script_many(lua, [(keys, args)])[0]

    def script_many(self, lua: str, calls: Sequence[tuple[Sequence[str], Sequence[Value]]]) -> list[Any]:
        """`script` for many (keys, args) in one round trip; each is atomic by itself. Raises the first error."""
        digest = _digest(lua)
        try:
            return self.many([("EVALSHA", digest, len(keys), *keys, *args) for keys, args in calls])
        except CommandRefused as error:
            if error.code != "NOSCRIPT":
                raise
        # a new server, or one that was flushed: with its text, so that another flush in between does no harm
        return self.many([("EVAL", lua, len(keys), *keys, *args) for keys, args in calls])

    def script_large(self, lua: str, keys: Sequence[str], args: Sequence[bytes]) -> Any:
        """`script` for large arguments: they are sent from where they lie and copied nowhere."""
        try:
            return self._ask(resp.packed_large(("EVALSHA", _digest(lua), len(keys), *keys), args), 1)[0]
        except CommandRefused as error:
            if error.code != "NOSCRIPT":
                raise
        return self._ask(resp.packed_large(("EVAL", lua, len(keys), *keys), args), 1)[0]

    def newest(self, key: str, count: int) -> list[Entry]:
        """The `count` newest entries of a stream, oldest first."""
        return entries_of(key, self.call("XREVRANGE", key, "+", "-", "COUNT", count)[::-1])[0]

    def entries_at(self, key: str, ids: Sequence[str]) -> dict[str, Entry]:
        """The entries of a stream with these ids, by id, oldest first; a round trip fetches `AT_ONCE`. Absent: gone."""
        found: dict[str, Entry] = {}
        ordered = sorted(set(ids), key=id_order)
        for first in range(0, len(ordered), AT_ONCE):
            asked = [("XRANGE", key, *ends) for ends in ranges_of(ordered[first : first + AT_ONCE])]
            rows = [row for reply in self.many(asked) for row in reply]
            found |= {entry.id: entry for entry in entries_of(key, rows)[0]}
        return found

    def ping(self) -> bool:
        """True once the server has answered."""
        return bool(self.call("PING") == b"PONG")

    def replaced(self) -> bool:
        """Whether another server process answers than when this was asked last. Costs nothing while none was lost.

        One that was killed comes back with what its file holds, which may be less than it had acknowledged.
        """
        if self._connected == self._seen:
            return False
        self._seen = self._connected
        found = re.search(rb"run_id:(\w+)", self.call("INFO", "server"))
        before, self._server = self._server, found[1].decode() if found else ""
        return before not in ("", self._server)

    def _on_connect(self, connection: Any) -> None:
        self._connected += 1
        try:
            connection.on_connect()
        except BaseException:
            connection.disconnect()  # the pool would take it back half made, and give it to the next caller
            raise

    def require_safe_server(self) -> None:
        """Raises `UnsafeServer` if the server may evict keys, or is older than 7.0."""
        lines = (line.partition(":") for line in self.call("INFO", "everything").decode().splitlines())
        info = {name: value for name, colon, value in lines if colon}
        policy = info.get("maxmemory_policy", "")
        if policy != "noeviction":
            raise UnsafeServer(
                f"Redis at {_shown(self.url)} has maxmemory-policy {policy!r}: it would silently drop "
                "trajectories; set it to 'noeviction'"
            )
        if info.get("aof_enabled") != "1":
            _LOG.warning("Redis at %s keeps no append-only file: jobs end with it", _shown(self.url))
        version = info.get("redis_version", "0")
        if int(version.split(".")[0]) < 7:
            raise UnsafeServer(f"Redis at {_shown(self.url)} is version {version}: 7.0 or newer is needed")

    def close(self) -> None:
        """Drop all connections."""
        self._closing.set()
        self._pool.disconnect()

    def pause(self, failures: int) -> None:
        """Back off: 0.1 s after the first failure, twice as long after each further one, at most 2 s."""
        self._closing.wait(self._backoff.compute(failures - 1))

    def _ask(self, pieces: Sequence[bytes], count: int) -> list[Any]:
        """`count` replies to what the pieces ask. Raises the first error reply."""
        replies = self._insist(pieces, count)
        for reply in replies:
            if isinstance(reply, redis.exceptions.ResponseError):
                raise CommandRefused(_code(reply), str(reply))
        return replies

    def _insist(self, pieces: Sequence[bytes], count: int) -> list[Any]:
        """`_exchange`, again after each lost connection until the deadline."""
        end = time.monotonic() + self.deadline
        failures = 0
        while True:
            try:
                return self._exchange(pieces, count)
            except redis.exceptions.AuthenticationError as error:
                raise BusDown(f"Redis at {_shown(self.url)} refuses us: {error}") from error
            except _RETRIED as error:
                if self._closing.is_set() or time.monotonic() > end:
                    story = f"Redis at {_shown(self.url)} of no use for {self.deadline:g} s: {error}"
                    raise BusDown(story) from error
                if failures == 0:
                    _LOG.warning("Redis at %s: %s; trying again", _shown(self.url), error)
                failures += 1
                self.reconnects += 1
                self.pause(failures)

    def _exchange(self, pieces: Sequence[bytes], count: int) -> list[Any]:
        """Send commands at once, read their `count` replies; an error reply stands in its place as exception.

        A full server is the exception to that: with one command it is raised, so that it is tried again.
        """
        connection = self._connection()
        try:
            _send(connection, pieces)
            replies: list[Any] = []
            for _ in range(count):
                try:
                    replies.append(connection.read_response())
                except redis.exceptions.ResponseError as error:
                    replies.append(error)
        except BaseException:
            connection.disconnect()  # a reply may still come: it is nobody's
            raise
        finally:
            self._pool.release(connection)
        if len(replies) == 1 and isinstance(replies[0], redis.exceptions.OutOfMemoryError):
            raise replies[0]
        return replies

    def _connection(self) -> Any:
        """One of the pool, connected."""
        try:
            return self._pool.get_connection()
        except redis.exceptions.RedisError:
            raise
        except BaseException:  # interrupted, perhaps while it connected: the pool then has it back half made
            self._pool.disconnect(inuse_connections=False)
            raise


@functools.cache
def _digest(lua: str) -> str:
    """By which the server knows a script."""
    return hashlib.sha1(lua.encode(), usedforsecurity=False).hexdigest()


def _send(connection: Any, pieces: Sequence[bytes]) -> None:
    """As the client library's own `send_packed_command`, which makes a call of the system for each piece."""
    if len(pieces) == 1:
        connection.send_packed_command(pieces)
        return
    try:
        resp.send(connection._sock, pieces)
    except TimeoutError as error:
        raise redis.exceptions.TimeoutError(f"Timeout writing to socket: {error}") from error
    except OSError as error:
        raise redis.exceptions.ConnectionError(f"Error while writing to socket: {error}") from error


def _code(error: redis.exceptions.ResponseError) -> str:
    """The client library cuts the code off the messages of the kinds that it knows."""
    if isinstance(error, redis.exceptions.NoScriptError):
        return "NOSCRIPT"
    first = str(error).partition(" ")[0]
    return first if first.isupper() else "ERR"


def _shown(url: str) -> str:
    """The URL without its password."""
    head, at, tail = url.rpartition("@")
    return url if not at else f"{head.partition('://')[0]}://...@{tail}"

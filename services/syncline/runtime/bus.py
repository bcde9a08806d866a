"""The bus: Redis streams, keys and scripts, with reconnection. The only importer of redis.

Commands go out raw under RESP2 and replies are shaped here, so what a caller gets does not change with the
client library's version. A command whose connection breaks is sent again until the deadline: a plain write
may therefore happen twice (at least once); scripts of the ledger are idempotent for that reason.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import msgspec
import redis
from redis.backoff import ExponentialBackoff

T = TypeVar("T")
Value = bytes | str | int | float
Script = Callable[[Sequence[str], Sequence[Value]], Any]

_LOG = logging.getLogger(__name__)
_RETRIED = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
)  # LOADING is a ConnectionError too
_BLOCK = 5.0  # seconds of one blocking read; a longer wait is several of them
_SOCKET = 15.0  # seconds without a reply after which a connection is given up; larger than _BLOCK
_PAGE = 256


class BusDown(Exception):
    """Redis could not be reached until the deadline, or it will never let us in."""


class UnsafeServer(Exception):
    """A Redis that may drop data or is too old. The message names the setting and the right value."""


class BadMessage(ValueError):
    """A message that is not of the declared shape. The message names the key and the entry's id."""


class Entry(msgspec.Struct, frozen=True):
    """One stream entry. `fields` is never empty: one whose fields are gone is a tombstone, see `Taken`."""

    id: str
    fields: dict[bytes, bytes]
    key: str = ""  # the stream it came from, for messages


class Taken(list[Entry]):
    """Entries of a group read. `deleted`: pending ids whose entry was gone; they are acknowledged already."""

    def __init__(self, entries: Iterable[Entry] = (), deleted: Iterable[str] = ()) -> None:
        super().__init__(entries)
        self.deleted: tuple[str, ...] = tuple(deleted)


def pack(message: msgspec.Struct) -> bytes:
    """msgpack bytes of a message."""
    return msgspec.msgpack.encode(message)


_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


@overload
def unpack(source: Entry | bytes, type: type[T]) -> T: ...
@overload
def unpack(source: Entry | bytes, type: Any) -> Any: ...
def unpack(source: Entry | bytes, type: Any) -> Any:
    """The message in an entry's field `m`, or in bytes. `type` may be a union of tagged structs.

    Raises `BadMessage` naming the key and id for anything that is not exactly of that type.
    """
    decoder = _DECODERS.get(type)
    if decoder is None:
        decoder = _DECODERS[type] = msgspec.msgpack.Decoder(type)
    if isinstance(source, Entry):
        where = f"{source.key or 'entry'} {source.id}"
        if b"m" not in source.fields:
            raise BadMessage(
                f"{where}: no field 'm' among {sorted(f.decode(errors='replace') for f in source.fields)}"
            )
        body = source.fields[b"m"]
    else:
        where, body = "message", source
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadMessage(f"{where}: {error}") from None


class Bus:
    """A connection pool to one Redis. Safe to share between threads, and across a fork.

    url        redis://, rediss:// or unix:// URL
    deadline   seconds for which an unreachable server is retried before `BusDown`
    """

    def __init__(self, url: str, deadline: float = 60.0) -> None:
        self.url = url
        self.deadline = deadline
        self.reconnects = 0  # commands sent again
        self.tombstones = 0  # pending ids whose entry was gone
        self.groups_recreated = 0
        self._backoff = ExponentialBackoff(cap=2.0, base=0.1)
        self._closing = threading.Event()
        self._pool = redis.ConnectionPool.from_url(
            url,
            protocol=2,
            decode_responses=False,
            socket_timeout=_SOCKET,
            socket_connect_timeout=5.0,
            retry=redis.retry.Retry(ExponentialBackoff(), 0),
            max_connections=4096,
        )

    # ---- commands ------------------------------------------------------------------------------------------
    def _exchange(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """Send commands in one write, read all replies; an error reply stands in its place as exception."""
        connection = self._pool.get_connection()
        try:
            packed = connection.pack_commands(commands)  # type: ignore[no-untyped-call]
            connection.send_packed_command(packed)  # type: ignore[no-untyped-call]
            replies: list[Any] = []
            for _ in commands:
                try:
                    replies.append(connection.read_response())
                except redis.exceptions.ResponseError as error:
                    replies.append(error)
            return replies
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]  # a reply may still be on its way: nobody may read it as his own
            raise
        finally:
            self._pool.release(connection)

    def _insist(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """`_exchange`, again after each lost connection until the deadline."""
        end = time.monotonic() + self.deadline
        failures = 0
        while True:
            try:
                return self._exchange(commands)
            except redis.exceptions.AuthenticationError as error:
                raise BusDown(f"Redis at {_shown(self.url)} refuses us: {error}") from error
            except _RETRIED as error:
                pause = self._backoff.compute(failures)
                if time.monotonic() + pause > end:
                    raise BusDown(
                        f"Redis at {_shown(self.url)} unreachable for {self.deadline:g} s: {error}"
                    ) from error
                if failures == 0:
                    _LOG.warning("Redis at %s: %s; trying again", _shown(self.url), error)
                failures += 1
                self.reconnects += 1
                self._closing.wait(pause)

    def _call(self, *command: Value) -> Any:
        reply = self._insist([command])[0]
        if isinstance(reply, redis.exceptions.ResponseError):
            raise reply
        return reply

    def many(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """Raw commands in one round trip, not atomic; raw replies in order. Raises the first error reply."""
        replies = self._insist(commands)
        for reply in replies:
            if isinstance(reply, redis.exceptions.ResponseError):
                raise reply
        return replies

    def script(self, lua: str) -> Script:
        """A callable `(keys, args) -> raw reply`; atomic. The script may run twice and must be idempotent."""
        sha = hashlib.sha1(lua.encode(), usedforsecurity=False).hexdigest()

        def run(keys: Sequence[str], args: Sequence[Value]) -> Any:
            try:
                return self._call("EVALSHA", sha, len(keys), *keys, *args)
            except redis.exceptions.NoScriptError:
                return self._call("EVAL", lua, len(keys), *keys, *args)

        return run

    def script_many(self, lua: str, calls: Sequence[tuple[Sequence[str], Sequence[Value]]]) -> list[Any]:
        """`script` for many calls in one round trip; each is atomic by itself. Raises the first error."""
        sha = hashlib.sha1(lua.encode(), usedforsecurity=False).hexdigest()
        commands: list[Sequence[Value]] = [("EVALSHA", sha, len(keys), *keys, *args) for keys, args in calls]
        try:
            return self.many(commands)
        except redis.exceptions.NoScriptError:
            self._call("SCRIPT", "LOAD", lua)
            return self.many(commands)

    def ping(self) -> bool:
        """True once the server has answered."""
        return bool(self._call("PING") == b"PONG")

    def require_safe_server(self) -> None:
        """Raises `UnsafeServer` if the server may evict keys, or is older than 7.0."""
        info = _info(self._call("INFO", "everything"))
        policy = info.get("maxmemory_policy", "")
        if policy != "noeviction":
            raise UnsafeServer(
                f"Redis at {_shown(self.url)} has maxmemory-policy {policy!r}: it would silently drop "
                "trajectories; set it to 'noeviction'"
            )
        version = info.get("redis_version", "0")
        if int(version.split(".")[0]) < 7:
            raise UnsafeServer(f"Redis at {_shown(self.url)} is version {version}: 7.0 or newer is needed")

    def close(self) -> None:
        """Drop all connections."""
        self._closing.set()
        self._pool.disconnect()

    # ---- streams -------------------------------------------------------------------------------------------
    def append(
        self, key: str, message: msgspec.Struct | Mapping[bytes, bytes], cap: int | None = None
    ) -> str:
        """XADD; returns the id. `cap` keeps about so many newest entries: for streams that may forget."""
        fields = {b"m": pack(message)} if isinstance(message, msgspec.Struct) else message
        trim: tuple[Value, ...] = () if cap is None else ("MAXLEN", "~", cap)
        return _text(self._call("XADD", key, *trim, "*", *_flat(fields)))

    def read(
        self, cursors: Mapping[str, str], block: float | None, count: int = 100
    ) -> dict[str, list[Entry]]:
        """Entries after each cursor ("0": from the beginning), only for keys that have some.

        block   seconds to wait for the first one; None: return at once
        """
        for key, cursor in cursors.items():
            if not cursor[:1].isdecimal():
                raise ValueError(
                    f"cursor {cursor!r} of {key} is no entry id; take `last_id` to read from now on"
                )
        tail = ("STREAMS", *cursors.keys(), *cursors.values())
        reply = self._blocking(block, lambda wait: self._call("XREAD", "COUNT", count, *wait, *tail))
        return {_text(key): _entries(_text(key), rows)[0] for key, rows in reply or ()}

    def last_id(self, key: str) -> str:
        """Id of the newest entry ("0" if there is none): the cursor after which only later ones come."""
        rows = self._call("XREVRANGE", key, "+", "-", "COUNT", 1)
        return _text(rows[0][0]) if rows else "0"

    def range(self, key: str, start: str = "-", end: str = "+", count: int | None = None) -> list[Entry]:
        """Entries with start <= id <= end, oldest first. "(id" excludes the bound."""
        limit: tuple[Value, ...] = () if count is None else ("COUNT", count)
        return _entries(key, self._call("XRANGE", key, start, end, *limit))[0]

    def length(self, key: str) -> int:
        """Entries in the stream."""
        return int(self._call("XLEN", key))

    def trim(self, key: str, before: str) -> int:
        """Drop entries with an id below `before`; returns how many."""
        return int(self._call("XTRIM", key, "MINID", before))

    def ensure_group(self, key: str, group: str) -> None:
        """Make the consumer group, reading from the beginning, if it is not there. Never from "now"."""
        try:
            self._call("XGROUP", "CREATE", key, group, "0", "MKSTREAM")
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def group_read(self, key: str, group: str, consumer: str, count: int, block: float | None) -> Taken:
        """New entries of the group. `block` as in `read`."""
        tail = ("STREAMS", key, ">")
        head = ("XREADGROUP", "GROUP", group, consumer, "COUNT", count)
        reply = self._blocking(block, lambda wait: self._in_group(key, group, *head, *wait, *tail))
        return self._taken(key, group, [row for _, rows in reply or () for row in rows])

    def group_pending(self, key: str, group: str, consumer: str) -> Taken:
        """All entries delivered to this consumer and not acknowledged, oldest first. They stay pending."""
        found, deleted, cursor = list[Entry](), list[str](), "0"
        while True:
            head = ("XREADGROUP", "GROUP", group, consumer, "COUNT", _PAGE)
            reply = self._in_group(key, group, *head, "STREAMS", key, cursor)
            rows = [row for _, rows in reply or () for row in rows]
            if not rows:
                return Taken(found, deleted)
            page = self._taken(key, group, rows)
            found.extend(page)
            deleted.extend(page.deleted)
            cursor = _text(rows[-1][0])

    def group_take_over(self, key: str, group: str, consumer: str, idle: float, count: int) -> Taken:
        """Take entries that nobody has touched for `idle` seconds, this consumer's own included."""
        found, deleted, cursor = list[Entry](), list[str](), "0-0"
        while True:
            command = (
                "XAUTOCLAIM",
                key,
                group,
                consumer,
                int(idle * 1000),
                cursor,
                "COUNT",
                count - len(found),
            )
            after, rows, gone = self._in_group(key, group, *command)[:3]
            page = self._taken(key, group, rows)
            found.extend(page)
            deleted.extend(page.deleted)
            deleted.extend(_text(id) for id in gone)
            self.tombstones += len(gone)  # the server has dropped these from the pending list itself
            cursor = _text(after)
            if cursor == "0-0" or len(found) >= count:
                return Taken(found, deleted)

    def group_keep(self, key: str, group: str, consumer: str, ids: Sequence[str]) -> list[str]:
        """Mark entries as still worked on. Returns those still this consumer's; others were taken over."""
        if not ids:
            return []
        return [_text(id) for id in self.script(_KEEP)([key], [group, consumer, *ids])]

    def group_pending_count(self, key: str, group: str) -> int:
        """Entries delivered to anyone in the group and not acknowledged."""
        return int(self._in_group(key, group, "XPENDING", key, group)[0])

    def ack(self, key: str, group: str, ids: Sequence[str], delete: bool = True) -> int:
        """Acknowledge, and delete atomically unless told not to. Returns how many were pending."""
        if not ids:
            return 0
        return int(self.script(_ACK)([key], [group, "1" if delete else "0", *ids]))

    def delete_entries(self, key: str, ids: Sequence[str]) -> int:
        """XDEL: for streams without a group. Returns how many were there."""
        return int(self._call("XDEL", key, *ids)) if ids else 0

    def _in_group(self, key: str, group: str, *command: Value) -> Any:
        """A group command that makes a vanished group anew, from the beginning, and goes on."""
        end = time.monotonic() + self.deadline
        failures = 0
        while True:
            try:
                return self._call(*command)
            except redis.exceptions.ResponseError as error:
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")) or time.monotonic() > end:
                    raise
                if failures:
                    self._closing.wait(self._backoff.compute(failures))
                failures += 1
                self.ensure_group(key, group)
                self.groups_recreated += 1
                _LOG.warning("group %s of %s was gone; made anew from the beginning", group, key)

    def _blocking(self, block: float | None, once: Callable[[tuple[Value, ...]], Any]) -> Any:
        """Repeat a read in slices of `_BLOCK` seconds, so that a hung server is noticed in a long wait."""
        if block is None or block <= 0:
            return once(())
        end = time.monotonic() + block
        while True:
            left = end - time.monotonic()
            reply = once(("BLOCK", max(1, int(min(left, _BLOCK) * 1000))))
            if reply or time.monotonic() >= end:
                return reply

    def _taken(self, key: str, group: str, rows: Sequence[Any]) -> Taken:
        entries, gone = _entries(key, rows)
        if gone:
            self.tombstones += len(gone)
            self.ack(key, group, gone)
            _LOG.warning("%s: %d pending entries of group %s were deleted by someone", key, len(gone), group)
        return Taken(entries, gone)

    # ---- keys ----------------------------------------------------------------------------------------------
    def get(self, key: str) -> bytes | None:
        """The string at `key`, or None."""
        return cast("bytes | None", self._call("GET", key))

    def set(self, key: str, value: Value, ttl: float | None = None, only_new: bool = False) -> bool:
        """Write a string; `ttl` in seconds. False: `only_new` was asked for and the key exists."""
        expiry: tuple[Value, ...] = () if ttl is None else ("PX", int(ttl * 1000))
        return self._call("SET", key, value, *expiry, *(("NX",) if only_new else ())) is not None

    def delete(self, *keys: str) -> int:
        """Delete keys; returns how many existed."""
        return int(self._call("DEL", *keys)) if keys else 0

    def exists(self, key: str) -> bool:
        """Whether the key exists."""
        return bool(self._call("EXISTS", key))

    def expire(self, key: str, ttl: float) -> bool:
        """Let the key end in `ttl` seconds. False: no such key."""
        return bool(self._call("PEXPIRE", key, int(ttl * 1000)))

    def hget(self, key: str, field: Value) -> bytes | None:
        """One hash field, or None."""
        return cast("bytes | None", self._call("HGET", key, field))

    def hset(self, key: str, field: Value | Mapping[Any, Value], value: Value | None = None) -> None:
        """Set one field to `value`, or all fields of a mapping."""
        if isinstance(field, Mapping):
            if field:
                self._call("HSET", key, *_flat(field))
        elif value is None:
            raise ValueError(f"hset {key} {field!r}: no value")
        else:
            self._call("HSET", key, field, value)

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        """All fields; empty for an absent key."""
        return _pairs(self._call("HGETALL", key))

    def hmget(self, key: str, fields: Sequence[Value]) -> list[bytes | None]:
        """Several fields, in order."""
        return cast("list[bytes | None]", self._call("HMGET", key, *fields)) if fields else []

    def hdel(self, key: str, *fields: Value) -> int:
        """Remove fields; returns how many existed."""
        return int(self._call("HDEL", key, *fields)) if fields else 0

    def hincrby(self, key: str, field: Value, by: int = 1) -> int:
        """Add to an integer field; returns the sum."""
        return int(self._call("HINCRBY", key, field, by))

    def hlen(self, key: str) -> int:
        """Number of fields."""
        return int(self._call("HLEN", key))

    def zadd(self, key: str, scores: Mapping[Any, float]) -> int:
        """Set members' scores; returns how many are new."""
        return int(self._call("ZADD", key, *(part for m, s in scores.items() for part in (s, m))))

    def zrange(self, key: str, start: int = 0, stop: int = -1, reverse: bool = False) -> list[bytes]:
        """Members by rank, lowest score first unless `reverse`."""
        turn = ("REV",) if reverse else ()
        return cast("list[bytes]", self._call("ZRANGE", key, start, stop, *turn))

    def zscores(self, key: str, start: int = 0, stop: int = -1) -> list[tuple[bytes, float]]:
        """Members with scores by rank, lowest first."""
        flat = self._call("ZRANGE", key, start, stop, "WITHSCORES")
        return [(member, float(score)) for member, score in zip(flat[::2], flat[1::2], strict=True)]

    def zrem(self, key: str, *members: Value) -> int:
        """Remove members; returns how many existed."""
        return int(self._call("ZREM", key, *members)) if members else 0

    def zcard(self, key: str) -> int:
        """Number of members."""
        return int(self._call("ZCARD", key))


_KEEP = """
-- KEYS: stream. ARGV: group, consumer, ids. Resets the idle time of those ids that are this consumer's.
local kept = {}
for i = 3, #ARGV do
  local row = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if row and row[2] == ARGV[2] then
    if #redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID') > 0 then
      kept[#kept + 1] = ARGV[i]
    end
  end
end
return kept
"""

_ACK = """
-- KEYS: stream. ARGV: group, '1' to delete too, ids.
local acked = 0
for i = 3, #ARGV do
  acked = acked + redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  if ARGV[2] == '1' then redis.call('XDEL', KEYS[1], ARGV[i]) end
end
return acked
"""


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _flat(fields: Mapping[Any, Value]) -> list[Value]:
    return [part for pair in fields.items() for part in pair]


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _entries(key: str, rows: Sequence[Any]) -> tuple[list[Entry], list[str]]:
    """Raw rows as (entries, ids of tombstones)."""
    entries: list[Entry] = []
    gone: list[str] = []
    for id, flat in rows:
        if flat:
            entries.append(Entry(_text(id), _pairs(flat), key))
        else:
            gone.append(_text(id))
    return entries, gone


def _info(reply: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _shown(url: str) -> str:
    """The URL without its password."""
    head, at, tail = url.rpartition("@")
    return url if not at else f"{head.partition('://')[0]}://...@{tail}"

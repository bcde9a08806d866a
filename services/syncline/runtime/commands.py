"""What commands on streams and keys take and give, whatever carries them. `bus.py` carries them to Redis."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from syncline.runtime.messages import Entry, Taken, Value, entries_of, flat_of, pack, pairs_of, text_of

Script = Callable[[Sequence[str], Sequence[Value]], Any]

_LOG = logging.getLogger(__name__)
_BLOCK = 5.0  # seconds of one blocking read; a longer wait is several of them
_PAGE = 256
_REMAKES = 30  # times in a row that a group may vanish within one call


class CommandRefused(Exception):
    """An error reply. `code` is Redis's word for its kind, such as NOGROUP or WRONGTYPE."""

    def __init__(self, code: str, story: str) -> None:
        super().__init__(story)
        self.code = code


class Commands(ABC):
    """Streams, groups and keys over `call` and `script`."""

    reconnects: int  # commands sent again
    tombstones: int  # pending ids whose entry was gone
    groups_recreated: int

    @abstractmethod
    def call(self, *command: Value) -> Any:
        """One raw command; its raw reply. Raises `CommandRefused` for an error reply."""

    @abstractmethod
    def script(self, lua: str) -> Script:
        """A callable `(keys, args) -> raw reply` that runs the script atomically."""

    @abstractmethod
    def pause(self, failures: int) -> None:
        """Back off after so many failures in a row."""

    # ---- streams -------------------------------------------------------------------------------------------
    def append(
        self, key: str, message: msgspec.Struct | Mapping[bytes, bytes], cap: int | None = None
    ) -> str:
        """XADD; returns the id. `cap` keeps about so many newest entries: for streams that may forget."""
        fields = {b"m": pack(message)} if isinstance(message, msgspec.Struct) else message
        trim: tuple[Value, ...] = () if cap is None else ("MAXLEN", "~", cap)
        return text_of(self.call("XADD", key, *trim, "*", *flat_of(fields)))

    def read(
        self, cursors: Mapping[str, str], block: float | None, count: int = 100
    ) -> dict[str, list[Entry]]:
        """Entries after each cursor ("0": from the beginning), only for keys that have some.

        block   seconds to wait for the first one; None: return at once
        """
        for key, cursor in cursors.items():
            if not cursor[:1].isdecimal():
                raise ValueError(f"cursor {cursor!r} of {key} is no entry id; `last_id` is the one for now")
        tail = ("STREAMS", *cursors.keys(), *cursors.values())
        reply = self._blocking(block, lambda wait: self.call("XREAD", "COUNT", count, *wait, *tail))
        return {text_of(key): entries_of(text_of(key), rows)[0] for key, rows in reply or ()}

    def last_id(self, key: str) -> str:
        """Id of the newest entry ("0" if there is none): the cursor after which only later ones come."""
        rows = self.call("XREVRANGE", key, "+", "-", "COUNT", 1)
        return text_of(rows[0][0]) if rows else "0"

    def range(self, key: str, start: str = "-", end: str = "+", count: int | None = None) -> list[Entry]:
        """Entries with start <= id <= end, oldest first. "(id" excludes the bound."""
        limit: tuple[Value, ...] = () if count is None else ("COUNT", count)
        return entries_of(key, self.call("XRANGE", key, start, end, *limit))[0]

    def length(self, key: str) -> int:
        """Entries in the stream."""
        return int(self.call("XLEN", key))

    def trim(self, key: str, before: str) -> int:
        """Drop entries with an id below `before`; returns how many."""
        return int(self.call("XTRIM", key, "MINID", before))

    def ensure_group(self, key: str, group: str) -> None:
        """Make the consumer group, reading from the beginning, if it is not there. Never from "now"."""
        try:
            self.call("XGROUP", "CREATE", key, group, "0", "MKSTREAM")
        except CommandRefused as error:
            if error.code != "BUSYGROUP":
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
            cursor = text_of(rows[-1][0])

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
            deleted.extend(text_of(id) for id in gone)
            self.tombstones += len(gone)  # the server has dropped these from the pending list itself
            cursor = text_of(after)
            if cursor == "0-0" or len(found) >= count:
                return Taken(found, deleted)

    def group_keep(
        self, key: str, group: str, consumer: str, ids: Sequence[str], idle: float = 0.0
    ) -> list[str]:
        """Mark entries as worked on `idle` seconds ago. Returns those still this consumer's; others were taken."""
        if not ids:
            return []
        return [text_of(id) for id in self.script(_KEEP)([key], [group, consumer, int(1000 * idle), *ids])]

    def group_pending_count(self, key: str, group: str) -> int:
        """Entries delivered to anyone and not acknowledged."""
        return int(self._in_group(key, group, "XPENDING", key, group)[0])

    def ack(self, key: str, group: str, ids: Sequence[str], delete: bool = True) -> int:
        """Acknowledge, and delete atomically unless told not to. Returns how many were pending."""
        if not ids:
            return 0
        return int(self.script(_ACK)([key], [group, "1" if delete else "0", *ids]))

    def delete_entries(self, key: str, ids: Sequence[str]) -> int:
        """XDEL: for streams without a group. Returns how many were there."""
        return int(self.call("XDEL", key, *ids)) if ids else 0

    def _in_group(self, key: str, group: str, *command: Value) -> Any:
        """A group command that makes a vanished group anew, from the beginning, and goes on."""
        failures = 0
        while True:
            try:
                return self.call(*command)
            except CommandRefused as error:
                if error.code not in ("NOGROUP", "UNBLOCKED") or failures > _REMAKES:
                    raise
            if failures:
                self.pause(failures)
            failures += 1
            self.ensure_group(key, group)
            self.groups_recreated += 1
            _LOG.warning("group %s of %s was not there; made from the beginning", group, key)

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
        entries, gone = entries_of(key, rows)
        if gone:
            self.tombstones += len(gone)
            self.ack(key, group, gone)
            _LOG.warning("%s: %d pending entries of group %s were deleted by someone", key, len(gone), group)
        return Taken(entries, gone)

    # ---- keys ----------------------------------------------------------------------------------------------
    def get(self, key: str) -> bytes | None:
        """The string at `key`, or None."""
        return cast("bytes | None", self.call("GET", key))

    def set(self, key: str, value: Value, ttl: float | None = None, only_new: bool = False) -> bool:
        """Write a string; `ttl` in seconds. False: `only_new` was asked for and the key exists."""
        expiry: tuple[Value, ...] = () if ttl is None else ("PX", int(ttl * 1000))
        return self.call("SET", key, value, *expiry, *(("NX",) if only_new else ())) is not None

    def delete(self, *keys: str) -> int:
        """Delete keys; returns how many existed."""
        return int(self.call("DEL", *keys)) if keys else 0

    def exists(self, key: str) -> bool:
        """Whether the key exists."""
        return bool(self.call("EXISTS", key))

    def expire(self, key: str, ttl: float) -> bool:
        """Let the key end in `ttl` seconds. False: no such key."""
        return bool(self.call("PEXPIRE", key, int(ttl * 1000)))

    def hget(self, key: str, field: Value) -> bytes | None:
        """One hash field, or None."""
        return cast("bytes | None", self.call("HGET", key, field))

    def hset(self, key: str, field: Value | Mapping[Any, Value], value: Value | None = None) -> None:
        """Set one field to `value`, or all fields of a mapping."""
        if isinstance(field, Mapping):
            if field:
                self.call("HSET", key, *flat_of(field))
        elif value is None:
            raise ValueError(f"hset {key} {field!r}: no value")
        else:
            self.call("HSET", key, field, value)

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        """All fields; empty for an absent key."""
        return pairs_of(self.call("HGETALL", key))

    def hmget(self, key: str, fields: Sequence[Value]) -> list[bytes | None]:
        """Several fields, in order."""
        return cast("list[bytes | None]", self.call("HMGET", key, *fields)) if fields else []

    def hdel(self, key: str, *fields: Value) -> int:
        """Remove fields; returns how many existed."""
        return int(self.call("HDEL", key, *fields)) if fields else 0

    def hincrby(self, key: str, field: Value, by: int = 1) -> int:
        """Add to an integer field; returns the sum."""
        return int(self.call("HINCRBY", key, field, by))

    def hlen(self, key: str) -> int:
        """Number of fields."""
        return int(self.call("HLEN", key))

    def zadd(self, key: str, scores: Mapping[Any, float]) -> int:
        """Set members' scores; returns how many are new."""
        return int(self.call("ZADD", key, *(part for m, s in scores.items() for part in (s, m))))

    def zrange(self, key: str, start: int = 0, stop: int = -1, reverse: bool = False) -> list[bytes]:
        """Members by rank, lowest score first unless `reverse`."""
        turn = ("REV",) if reverse else ()
        return cast("list[bytes]", self.call("ZRANGE", key, start, stop, *turn))

    def zscores(self, key: str, start: int = 0, stop: int = -1) -> list[tuple[bytes, float]]:
        """Members with scores by rank, lowest first."""
        flat = self.call("ZRANGE", key, start, stop, "WITHSCORES")
        return [(member, float(score)) for member, score in zip(flat[::2], flat[1::2], strict=True)]

    def zrem(self, key: str, *members: Value) -> int:
        """Remove members; returns how many existed."""
        return int(self.call("ZREM", key, *members)) if members else 0

    def zcard(self, key: str) -> int:
        """Number of members."""
        return int(self.call("ZCARD", key))


_KEEP = """
-- KEYS: stream. ARGV: group, consumer, idle, ids. Sets the idle time (ms) of this consumer's; a group gone has none.
local kept = {}
for i = 4, #ARGV do
  local row = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  local mine = row and row[2] == ARGV[2] and
    #redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID') > 0
  if mine then kept[#kept + 1] = ARGV[i] end
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

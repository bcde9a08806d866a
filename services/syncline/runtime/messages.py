"""Messages as they lie in streams: one msgpack field `m`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
Value = bytes | str | int | float


class BadMessage(ValueError):
    """A message that is not of the declared shape. The message names the key and the entry's id."""


class Entry(msgspec.Struct, frozen=True, gc=False):
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


def text_of(value: bytes | str) -> str:
    """Ids and keys as text."""
    return value.decode() if isinstance(value, bytes) else value


def id_order(id: str) -> tuple[int, int]:
    """Stream ids in the order of time."""
    milliseconds, _, sequence = id.partition("-")
    return int(milliseconds), int(sequence or 0)


def ranges_of(ids: Iterable[str]) -> list[tuple[str, str]]:
    """Stream ids, in the order of time, as first and last ones of ranges in which no other id can lie.

    What one script adds has one millisecond and follows in sequence, so a batch of records is one range, not many.
    """
    ranges: list[tuple[str, str]] = []
    expected = (-1, -1)
    for id in ids:
        milliseconds, sequence = id_order(id)
        if (milliseconds, sequence) == expected:
            ranges[-1] = (ranges[-1][0], id)
        else:
            ranges.append((id, id))
        expected = (milliseconds, sequence + 1)
    return ranges


def flat_of(fields: Mapping[Any, Value]) -> list[Value]:
    """Field, value, field, value."""
    return [part for pair in fields.items() for part in pair]


def pairs_of(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Inverse of `flat_of`."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def entries_of(key: str, rows: Sequence[Any]) -> tuple[list[Entry], list[str]]:
    """Raw rows as (entries, ids of tombstones)."""
    entries: list[Entry] = []
    gone: list[str] = []
    for id, flat in rows:
        if flat:
            entries.append(Entry(text_of(id), pairs_of(flat), key))
        else:
            gone.append(text_of(id))
    return entries, gone

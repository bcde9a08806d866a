"""A record's stream field taken apart, changed in one place and put together, by the text of its contract alone."""

from __future__ import annotations

import struct

HEADER, TOKENS, LOGPROBS, LOSS_MASK, EXPERT_IDS, MASK_SIZES, MASK_IDS = range(7)
_SIZES = struct.Struct("<7I")
_ABSENT = 2**32 - 1


def parts(fields: dict[bytes, bytes]) -> list[bytes | None]:
    """The parts of a whole record."""
    body = fields[b"r"]
    at, found = _SIZES.size, list[bytes | None]()
    for size in _SIZES.unpack_from(body):
        found.append(None if size == _ABSENT else body[at : at + size])
        at += 0 if size == _ABSENT else size
    assert at == len(body)
    return found


def joined(parts: list[bytes | None]) -> dict[bytes, bytes]:
    """Inverse of `parts`."""
    sizes = _SIZES.pack(*[_ABSENT if part is None else len(part) for part in parts])
    return {b"r": sizes + b"".join(part for part in parts if part is not None)}


def with_part(fields: dict[bytes, bytes], which: int, part: bytes | None) -> dict[bytes, bytes]:
    """The record with another part."""
    found = parts(fields)
    found[which] = part
    return joined(found)

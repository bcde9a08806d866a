"""Records on their way into the ledger: in transactions of bounded size. For `ledger.py` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from syncline.contract.token_path import Trajectory, encode

_RECORDS = 128  # and bytes, that one transaction takes at most: others wait for it meanwhile
_BYTES = 4 << 20


def transactions(records: Sequence[Trajectory]) -> Iterator[list[bytes]]:
    """What `publish.lua` takes, for all records in order: what it must know of each, then the fields of each."""
    told: list[tuple[str, int, int, int, int, str]] = []
    fields: list[bytes] = []
    size = 0
    for n, record in enumerate(records, start=1):
        parts, begun = encode(record), record.oldest
        names = b" ".join(parts).decode()
        told.append((record.trajectory, record.attempt, begun.number, begun.epoch, record.sampled, names))
        fields += parts.values()
        size += sum(map(len, parts.values()))
        if size >= _BYTES or n % _RECORDS == 0 or n == len(records):
            yield [msgspec.msgpack.encode(told), *fields]
            told, fields, size = [], [], 0

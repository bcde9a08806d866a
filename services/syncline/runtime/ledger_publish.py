"""Records on their way into the ledger: in transactions of bounded size. For `ledger.py` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from syncline.contract.token_path import Trajectory
from syncline.contract.trajectory_wire import RECORD, encode

_RECORDS = 128  # and bytes, that one transaction takes at most: others wait for it meanwhile
_BYTES = 4 << 20


def transactions(records: Sequence[Trajectory]) -> Iterator[list[bytes]]:
    """What `publish.lua` takes, for all records in order: what it must know of each, then each."""
    told, bodies, size = list[object](), list[bytes](), 0
    for n, record in enumerate(records, start=1):
        body, begun = encode(record)[RECORD], record.oldest
        told += (record.trajectory, record.attempt, begun.number, begun.epoch, record.sampled)
        bodies.append(body)
        size += len(body)
        if size >= _BYTES or n % _RECORDS == 0 or n == len(records):
            yield [b"".join(map(msgspec.msgpack.encode, told)), *bodies]
            told, bodies, size = [], [], 0

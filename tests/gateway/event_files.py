"""What trackers wrote, read back from the files: TensorBoard's records, and a run of Weights & Biases."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

BLOCK = 32768  # bytes of a block of a LevelDB log, which a run file is
Points = dict[tuple[str, int], float]
"""(scalar, step) -> value."""


def scalars_in(folder: Path) -> Points:
    """All scalars of the event files in `folder`."""
    found: Points = {}
    for path in sorted(folder.glob("*.tfevents.*")):
        for raw in _records(path.read_bytes()):
            event = Event.FromString(raw)
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    return found


def _records(raw: bytes) -> Iterator[bytes]:
    """TFRecord: length and its checksum, data and its checksum. Both are checked."""
    at = 0
    while at < len(raw):
        (size,) = struct.unpack_from("<Q", raw, at)
        assert struct.unpack_from("<I", raw, at + 8)[0] == _masked(raw[at : at + 8])
        data = raw[at + 12 : at + 12 + size]
        assert struct.unpack_from("<I", raw, at + 12 + size)[0] == _masked(data)
        yield data
        at += 16 + size


def _masked(data: bytes) -> int:
    found = int(crc32c(data))
    return (((found >> 15) | (found << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def wandb_records(path: Path) -> list[Record]:
    """The records of a run file: a LevelDB log behind a header of seven bytes."""
    raw = path.read_bytes()
    assert raw[:4] == b":W&B"
    found, held, at = [], b"", 7
    while at + 7 <= len(raw):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        size, kind = struct.unpack_from("<HB", raw, at + 4)
        held += raw[at + 7 : at + 7 + size]
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(held))
            held = b""
        at += 7 + size
    return found


def history_of(path: Path) -> Points:
    """The scalars that a run file holds, by the `update` of their row."""
    found: Points = {}
    for record in wandb_records(path):
        if record.WhichOneof("record_type") != "history":
            continue
        row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        found |= {(name, int(row["update"])): value for name, value in row.items()}
    return found

"""Writing the files of an export (`contract/exports.py`) one tensor at a time, hashed and fsynced.

Every rank calls `write_rank`; when all are done, one of them collects their `RankExport`s and calls `finish`:

    layout = Layout(engine="megatron_local", grid=Grid(tp=2), model=dimensions(config_json))
    facts = {"decoder.layers.0.mlp.linear_fc1.weight": ("BF16", (64, 32))}  # all that Sharding(...).on(rank) names
    mine = write_rank(folder, layout, rank, facts, ((name, bytes_of(parameters[name])) for name in facts))

    stamp = stamp_of(layout, ranks)  # on one rank, which has everybody's `mine`
    files = finish(folder, ShardedExport(layout=layout, shapes=full_shapes, stamp=stamp), ranks, config_bytes)

`RankExport`s travel as `msgspec` JSON in whatever way the ranks talk. `files` is `Minted.files`.

Tensors come from a generator, in any order, and each is dropped before the next, so that a rank needs room for one of
them. The container is safetensors': 8 bytes of header length, a JSON header, the bytes; wider elements lie first, so
that each is aligned. Its library writes only tensors that are all there at once.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from syncline.contract.exports import CONFIG_FILE, SHARDS_FILE, WIDTHS, RankExport, ShardedExport, rank_file
from syncline.contract.sharding.layout import Layout
from syncline.contract.sharding.stamps import ExportStamp, ShardStamp
from syncline.runtime.durable import sync_file, sync_folder, write_whole

Buffer = bytes | bytearray | memoryview
Facts = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> dtype (safetensors' name) and shape."""
_ALIGNED = 8  # bytes; where the first tensor begins


class Wrote(msgspec.Struct, frozen=True):
    """A file that is on disk. `tensors`: name -> sha256 hex of the tensor's bytes; empty unless `stamped`."""

    sha256: str
    tensors: dict[str, str]


def write_tensors(
    path: Path, facts: Facts, tensors: Iterable[tuple[str, Buffer]], *, stamped: bool = True
) -> Wrote:
    """Write `path` (new): all tensors of `facts`, each given once as (name, C-contiguous little-endian bytes).

    stamped   each tensor's digest is wanted, beside the file's

    Raises `ValueError` naming the tensor for a dtype without a name here, another number of bytes, and one that is
    missing, unknown or given twice; `OSError`. What a failed call leaves behind is no export: nobody stamped it.
    """
    text, places = _header(facts)
    digests: dict[str, str] = {}
    missing = set(facts)
    with path.open("xb", buffering=0) as file:
        _write(file.fileno(), memoryview(text), 0)
        for name, given in tensors:
            if name not in missing:
                raise ValueError(f"tensor {name} is {'given twice' if name in places else 'not announced'}")
            missing.remove(name)
            at, size = places[name]
            data = memoryview(given)
            if data.nbytes != size:
                dtype, shape = facts[name]
                raise ValueError(f"tensor {name} has {data.nbytes} bytes; {dtype} {list(shape)} has {size}")
            raw = data.cast("B") if size else memoryview(b"")  # a zero in the shape has no cast
            if stamped:
                digests[name] = hashlib.sha256(raw).hexdigest()
            _write(file.fileno(), raw, len(text) + at)
            del given, data, raw
        if missing:
            raise ValueError(f"tensor {min(missing)} was announced and not given")
    return Wrote(sync_file(path), digests)


def _header(facts: Facts) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """What comes before the tensors, and where each begins after it, with its size in bytes."""
    for name, (dtype, _) in facts.items():
        if dtype not in WIDTHS:
            raise ValueError(f"tensor {name} has dtype {dtype}; known are {', '.join(WIDTHS)}")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for name in sorted(facts, key=lambda name: (-WIDTHS[facts[name][0]], name)):
        dtype, shape = facts[name]
        size = WIDTHS[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        places[name] = at, size
        at += size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text, places


def write_rank(
    folder: Path, layout: Layout, rank: int, facts: Facts, tensors: Iterable[tuple[str, Buffer]]
) -> RankExport:
    """Write the file of rank `rank` into `folder` (made if absent). Arguments and errors as `write_tensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    place = layout.grid.rank(rank)
    wrote = write_tensors(folder / rank_file(rank), facts, tensors)
    return RankExport(
        rank=rank,
        sha256=wrote.sha256,
        shards=tuple(
            ShardStamp(rank=place, tensor=name, dtype=dtype, shape=tuple(shape), digest=wrote.tensors[name])
            for name, (dtype, shape) in sorted(facts.items())
        ),
    )


def stamp_of(layout: Layout, ranks: Iterable[RankExport]) -> ExportStamp:
    """The stamps of all `ranks` that took part."""
    shards = (shard for rank in sorted(ranks, key=lambda rank: rank.rank) for shard in rank.shards)
    return ExportStamp(layout=layout.digest(), shards=tuple(shards))


def finish(folder: Path, export: ShardedExport, ranks: Iterable[RankExport], config: bytes) -> dict[str, str]:
    """Write `shards.json` and `config.json` when all `ranks` are on disk; `Minted.files` of the export."""
    files = {rank_file(rank.rank): rank.sha256 for rank in ranks}
    for name, data in ((SHARDS_FILE, msgspec.json.encode(export)), (CONFIG_FILE, config)):
        files[name] = write_file(folder / name, data)
    sync_folder(folder.parent)
    return files


def write_file(path: Path, data: bytes) -> str:
    """Write `path` whole and durably; sha256 hex of `data`."""
    write_whole(path, data)
    return hashlib.sha256(data).hexdigest()


def _write(descriptor: int, raw: memoryview, at: int) -> None:
    done = 0
    while done < len(raw):  # the system may take only a part
        done += os.pwrite(descriptor, raw[done:], at + done)

"""Tensors into safetensors files of bounded size, with the index that `transformers` and SGLang read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from syncline.contract.exports import WIDTHS
from syncline.exporting.held import CannotExport
from syncline.exporting.source import Buffer, Fact, Source
from syncline.runtime.durable import write_whole
from syncline.runtime.export_files import write_tensors

INDEX = "model.safetensors.index.json"
Wrote = Callable[[int], None]
"""Called with the bytes of each tensor that was written."""


def nbytes(fact: Fact) -> int:
    """Bytes of a tensor."""
    return WIDTHS[fact.dtype] * math.prod(fact.shape)


def shards(facts: Mapping[str, Fact], most: int) -> list[list[str]]:
    """Names by file: as many, in their order, as fit into `most` bytes; a larger tensor is a file of its own."""
    out: list[list[str]] = []
    size = 0
    for name in sorted(facts):
        add = nbytes(facts[name])
        if not out or size + add > most:
            out.append([])
            size = 0
        out[-1].append(name)
        size += add
    return out


def write_model(folder: Path, source: Source, most: int, wrote: Wrote) -> None:
    """All tensors of `source` into `folder`: `model.safetensors`, or numbered files with an index."""
    groups = shards(source.facts, most)
    if len(groups) == 1:
        write_file(folder / "model.safetensors", source, groups[0], lambda name: name, wrote)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(folder / file, source, names, lambda name: name, wrote)
        where |= dict.fromkeys(names, file)
    total = sum(nbytes(fact) for fact in source.facts.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_whole(folder / INDEX, msgspec.json.format(msgspec.json.encode(index)))


def write_file(
    path: Path, source: Source, names: list[str], renamed: Callable[[str], str], wrote: Wrote
) -> None:
    """`names` of `source` into `path`, under other names if `renamed` says so.

    Raises `CannotExport` naming a tensor whose bytes, as they were written, have another digest than they should.
    """
    facts = {renamed(name): (source.facts[name].dtype, source.facts[name].shape) for name in names}

    def given() -> Iterator[tuple[str, Buffer]]:
        for name, raw in source.tensors(names):
            yield renamed(name), raw
            wrote(nbytes(source.facts[name]))

    done = write_tensors(path, facts, given())
    for name in names:
        due, found = source.facts[name].digest, done.tensors[renamed(name)]
        if due and found != due:
            raise CannotExport(
                f"tensor {name}: its blob holds bytes with digest {found}, the manifest says {due}"
            )

"""Codes and scales of low-bit weights, cut where their weights are: on the edges of blocks, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from syncline.contract.artefact import Part, parts
from syncline.contract.partition import legal_sizes
from syncline.contract.plan import PlanEntry
from syncline.contract.schemes import Scheme
from syncline.contract.sharding.cuts import Piece, cut, ranges
from syncline.contract.sharding.grid import BadLayout
from syncline.contract.sharding.layout import Layout, Rule

Cut = tuple[str, tuple[int, ...], tuple[Piece, ...], str]
"""Name, shape and pieces of a shard, and the tensor that gives its dtype."""


def entries_of(sources: tuple[str, ...], low: Mapping[str, PlanEntry]) -> tuple[PlanEntry, ...]:
    """The low-bit entries of `sources`; empty: they are wide. Raises `BadLayout` where they are not stored alike."""
    found = [low.get(source) for source in sources]
    entries = tuple(entry for entry in found if entry is not None)
    if entries and len(entries) < len(sources):
        wide = next(source for source, entry in zip(sources, found, strict=True) if entry is None)
        raise BadLayout(
            f"tensor {entries[0].name} is low-bit and {wide} is wide; the engine has both in one matrix"
        )
    for entry in entries:
        if entry.weight != entries[0].weight:
            raise BadLayout(
                f"tensors {entries[0].name} and {entry.name} have different schemes; the engine has both in one matrix"
            )
    return entries


def check_blocks(layout: Layout, rule: Rule, entries: tuple[PlanEntry, ...], count: int) -> None:
    """Raises `BadLayout` with the legal sizes where `rule` cuts `entries` into `count` parts inside a block."""
    if rule.pad and layout.padded(entries[0].shape[0]) != entries[0].shape[0]:
        raise BadLayout(f"tensor {entries[0].name} is low-bit, and {rule.name} adds rows to the vocabulary")
    if rule.join == "groups":
        _check_groups(layout, rule, entries, count)
        return
    for at, entry in enumerate(entries):
        distinct, _ = ranges(layout, rule, at, entry.name, entry.shape[rule.axis], count)
        legal = legal_sizes(entry)
        if distinct not in legal:
            raise BadLayout(
                f"tensor {entry.name}: {rule.over} {count} cuts it into {distinct} parts inside a block; "
                f"legal: {', '.join(map(str, legal))}"
            )
        scheme = _scheme(entry)
        each = entry.shape[0] // (distinct if rule.axis == 0 else 1)
        if at < len(entries) - 1 and each % scheme.rows:
            raise BadLayout(
                f"tensor {entry.name}: {each} rows of it lie before {entries[at + 1].name} in one matrix, no multiple "
                f"of the block of {scheme.rows}"
            )


def _check_groups(layout: Layout, rule: Rule, entries: tuple[PlanEntry, ...], count: int) -> None:
    """Raises `BadLayout` where query groups, or ranks that share one, begin or end inside a block of rows."""
    rows = _scheme(entries[0]).rows
    shapes = {entry.name: entry.shape for entry in entries}
    for part in range(count):
        for piece in cut(layout, rule, tuple(shapes), shapes, count, part)[0]:
            if piece.start % rows or piece.stop % rows or piece.at % rows:
                raise BadLayout(
                    f"tensor {piece.source}: {rule.name} interleaves rows {piece.start} to {piece.stop} of it by query "
                    f"groups, which cuts a block of {rows} rows"
                )


def cut_parts(
    name: str, shape: tuple[int, ...], pieces: tuple[Piece, ...], entries: tuple[PlanEntry, ...], each: int
) -> Iterator[Cut]:
    """The shards of codes and scales that belong to the shard `name` of low-bit weights, codes first.

    entries  of the pieces' sources, slot by slot
    each     how many of them lie in one slot; where more than one, their outer scales lie in that order
    """
    sources = {entry.name: {part.role: part for part in parts(entry)} for entry in entries}
    lead = shape[:1] if pieces[0].slot is not None else ()
    for role, first in sources[entries[0].name].items():
        suffix = first.name.removeprefix(first.source)
        if role == "shape":  # no kernel reads it: it stays whole, under its own name
            for part in (found[role] for found in sources.values()):
                whole = Piece(source=part.name, axis=0, start=0, stop=part.shape[0], at=0)
                yield part.name, part.shape, (whole,), part.name
            continue
        named = {source: found[role] for source, found in sources.items()}
        if role == "outer":
            held = tuple(
                Piece(source=named[p.source].name, axis=0, start=0, stop=1, at=i % each, slot=p.slot)
                for i, p in enumerate(pieces)
            )
            yield name + suffix, (*lead, each) if each > 1 else lead, held, first.name
            continue
        moved = tuple(_scaled(pieces, named, entries))
        rest = list(first.shape)
        rest[pieces[0].axis] = max(piece.at + piece.stop - piece.start for piece in moved)
        yield name + suffix, (*lead, *rest), moved, first.name


def _scaled(
    pieces: tuple[Piece, ...], parts_of: Mapping[str, Part], entries: tuple[PlanEntry, ...]
) -> Iterator[Piece]:
    shapes = {entry.name: entry.shape for entry in entries}
    scheme = _scheme(entries[0])
    at, slot = 0, None
    for piece in pieces:
        if piece.slot != slot:
            at, slot = 0, piece.slot
        part, size = parts_of[piece.source], shapes[piece.source][piece.axis]
        start, stop = (_position(p, size, part, piece.axis, scheme) for p in (piece.start, piece.stop))
        yield msgspec.structs.replace(piece, source=part.name, start=start, stop=stop, at=at)
        at += stop - start


def _position(at: int, size: int, part: Part, axis: int, scheme: Scheme) -> int:
    """Where value `at` of `size` along `axis` lies in `part`; the end is the part's end, padded or partial."""
    if at == size:
        return part.shape[axis]
    if part.role == "scale":
        step = (scheme.rows, scheme.columns)[axis]
    else:
        step = 1 if axis == 0 else {"int4": 8, "mxfp4": 2, "nvfp4": 2}.get(scheme.format, 1)
    if at % step:
        raise AssertionError(f"{part.name} is cut at {at}, inside {step} values")
    return at // step


def _scheme(entry: PlanEntry) -> Scheme:
    assert entry.weight is not None
    return entry.weight

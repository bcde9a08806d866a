"""The arithmetic of one cut: which ranges of a rule's sources one part is made of, and what shape that has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from syncline.contract.sharding.grid import BadLayout
from syncline.contract.sharding.layout import Layout, Rule, Unit

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Run = tuple[str, int, int]  # source, start, stop


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """`source[start:stop]` along `axis` lies at `at` along the same axis of the shard; other axes are whole.

    source   full tensor; "": zeros that no full tensor has
    slot     index in a leading axis that the shard has and the source has not; None: it has none
    same     an equal piece of another source lies there already
    """

    source: str
    axis: int
    start: int
    stop: int
    at: int
    slot: int | None = None
    same: bool = False


def cut(
    layout: Layout, rule: Rule, sources: tuple[str, ...], shapes: Shapes, parts: int, part: int
) -> tuple[tuple[Piece, ...], Shape]:
    """Pieces and shape of part `part` of `parts` that `rule` makes of full tensors `sources`.

    Raises `BadLayout` for sizes that the cut does not divide, or sources whose other axes differ.
    """
    axis = rule.axis
    for source in sources:
        if shapes[source] and len(shapes[source]) <= axis:
            raise BadLayout(
                f"tensor {source} of shape {list(shapes[source])} has no axis {axis} to be cut along"
            )
    rest = {shapes[source][:axis] + shapes[source][axis + 1 :] for source in sources}
    if len(rest) > 1:
        told = ", ".join(f"{source} {list(shapes[source])}" for source in sources)
        raise BadLayout(f"tensors {told} lie in one {rule.name}, and only axis {axis} may differ")
    pieces: list[Piece] = []
    at = 0
    for source, start, stop in _runs(layout, rule, sources, shapes, parts, part):
        same = rule.join == "shared" and source != sources[0]
        where = 0 if same else at
        pieces.append(Piece(source=source, axis=axis, start=start, stop=stop, at=where, same=same))
        at += 0 if same else stop - start
    shape = shapes[sources[0]]
    return tuple(pieces), (*shape[:axis], at, *shape[axis + 1 :]) if shape else shape


def length(shape: Shape, axis: int) -> int:
    """Size of `shape` along `axis`; a scalar is one value."""
    return shape[axis] if shape else 1


def ranges(layout: Layout, rule: Rule, at: int, source: str, size: int, parts: int) -> tuple[int, int]:
    """Into how many different parts source number `at`, `size` long, is cut, and on how many neighbours each lies.

    Raises `BadLayout` with the legal numbers of parts.
    """
    unit: Unit = rule.units[at] if rule.units else ""
    units = _units(layout, unit, source, size)
    if units % parts == 0:
        return parts, 1
    replicated = rule.replicate and unit == "kv_heads"
    if replicated and parts % units == 0:
        return units, parts // units
    more = f", or a multiple of {units}" if replicated else ""
    what = (
        f"{units} {unit.replace('_', ' ')}" if unit else f"{size} {'rows' if rule.axis == 0 else 'columns'}"
    )
    legal = ", ".join(str(n) for n in range(1, units + 1) if units % n == 0)
    raise BadLayout(f"tensor {source}: {rule.over} {parts} does not divide its {what}; legal: {legal}{more}")


def _runs(
    layout: Layout, rule: Rule, sources: tuple[str, ...], shapes: Shapes, parts: int, part: int
) -> Iterator[Run]:
    sizes = [length(shapes[source], rule.axis) for source in sources]
    if rule.join == "groups":
        yield from _window(_grouped(layout, rule, sources, sizes, parts), parts, part)
        return
    if rule.pad:
        padded = layout.padded(sizes[0])
        yield from _window([(sources[0], 0, sizes[0]), ("", 0, padded - sizes[0])], parts, part)
        return
    for at, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        distinct, neighbours = ranges(layout, rule, at, source, size, parts)
        each = size // distinct
        start = part // neighbours * each
        yield source, start, start + each


def _grouped(layout: Layout, rule: Rule, sources: tuple[str, ...], sizes: list[int], parts: int) -> list[Run]:
    """For each KV head its rows of each source: `q q q k v | q q q k v | ...`."""
    groups = layout.model.kv_heads
    for at, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        _units(layout, rule.units[at], source, size)
        _units(layout, "kv_heads", source, size)
    whole = sum(sizes)
    legal = [
        n
        for n in range(1, layout.model.heads + 1)
        if groups % n == 0 or (n % groups == 0 and layout.model.heads % n == 0 and whole % n == 0)
    ]
    if parts not in legal:
        raise BadLayout(
            f"tensor {sources[0]}: {rule.over} {parts} does not divide {layout.model.heads} heads in {groups} query "
            f"groups; legal: {', '.join(map(str, legal))}"
        )
    return [
        (source, group * size // groups, (group + 1) * size // groups)
        for group in range(groups)
        for source, size in zip(sources, sizes, strict=True)
    ]


def _window(runs: list[Run], parts: int, part: int) -> Iterator[Run]:
    """The `part`-th of `parts` equal parts of `runs` lying behind one another."""
    total = sum(stop - start for _, start, stop in runs)
    low, high = part * (total // parts), (part + 1) * (total // parts)
    at = 0
    for source, start, stop in runs:
        first, last = max(low, at), min(high, at + stop - start)
        if first < last:
            yield source, start + first - at, start + last - at
        at += stop - start


def _units(layout: Layout, unit: Unit, source: str, size: int) -> int:
    if not unit:
        return size
    count = layout.model.heads if unit == "heads" else layout.model.kv_heads
    if count < 1 or size % count:
        raise BadLayout(f"tensor {source}: {size} values along the cut are no multiple of {count} {unit}")
    return count

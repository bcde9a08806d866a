"""Full tensors to the shards of a layout, one shard at a time. One that is a single piece is a view, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from syncline.contract.sharding.cuts import Shapes
from syncline.contract.sharding.layout import Layout
from syncline.contract.sharding.pieces import Shard, Sharding
from syncline.sync.reshard.arrays import Array, equal, region, zeros


class BadShards(ValueError):
    """Shards or full tensors that do not fit their layout or their stamps. Names tensor and rank."""


def scatter(
    full: Mapping[str, Array], layout: Layout, ranks: Iterable[int] | None = None
) -> dict[int, dict[str, Array]]:
    """Rank index -> parameter name -> shard of wide tensors `full`, for `ranks` (None: all). Raises as `scattered`."""
    sharding = Sharding(layout, {name: tuple(array.shape) for name, array in full.items()})
    wanted = tuple(range(layout.grid.size) if ranks is None else ranks)
    out: dict[int, dict[str, Array]] = {index: {} for index in wanted}
    for shard, array in scattered(full, sharding, wanted):
        out[shard.rank.index][shard.name] = array
    return out


def scattered(
    full: Mapping[str, Array], sharding: Sharding, ranks: Iterable[int]
) -> Iterator[tuple[Shard, Array]]:
    """Each shard of `ranks` with its array, tensor by tensor: shards of the same full tensors follow one another.

    full    the artefact's tensors; each is looked up once for all the ranks, so that it may be a mapping that reads or
            gathers (`Gathering`), and no more than the sources of one shard are held at a time
    Raises `BadLayout` for a layout that does not fit the model, and `BadShards` for a tensor that is missing or has
    another shape, and for tensors that lie in one place and differ.
    """
    sharding.check()
    shapes = sharding.tensors()
    together: dict[frozenset[str], list[Shard]] = {}
    for index in ranks:
        for shard in sharding.on(index):
            sources = frozenset(piece.source for piece in shard.pieces if piece.source)
            together.setdefault(sources | {shard.like}, []).append(shard)
    for sources, wanted in together.items():
        held = {name: full[name] for name in sorted(sources) if name in full}
        for shard in wanted:
            yield shard, made(shard, held, shapes)
        held.clear()  # before the next tensors are gathered


def made(shard: Shard, full: Mapping[str, Array], shapes: Shapes) -> Array:
    """The array of `shard` from `full`, whose tensors have `shapes`. Raises `BadShards`."""
    first = _looked_up(shard, shard.like, full, shapes)
    if len(shard.pieces) == 1 and shard.pieces[0].source and shard.pieces[0].slot is None and first.ndim:
        piece = shard.pieces[0]
        return region(first, piece.axis, piece.start, piece.stop)
    out = zeros(shard.shape, first)
    for piece in shard.pieces:
        if not piece.source:
            continue  # zeros already
        source = _looked_up(shard, piece.source, full, shapes)
        if source.dtype != out.dtype:
            raise BadShards(
                f"tensor {piece.source} has dtype {source.dtype}, {shard.like} {out.dtype}; both lie in {shard}"
            )
        taken = region(source, piece.axis, piece.start, piece.stop)
        put = region(out, piece.axis, piece.at, piece.at + piece.stop - piece.start, piece.slot)
        if not piece.same:
            put[:] = taken
        elif not equal(put, taken):
            raise BadShards(f"tensors {shard.like} and {piece.source} differ, and {shard} is both")
    return out


def _looked_up(shard: Shard, name: str, full: Mapping[str, Array], shapes: Shapes) -> Array:
    if name not in full:
        raise BadShards(f"tensor {name} is missing; {shard} is made of it")
    array = full[name]
    if tuple(array.shape) != tuple(shapes[name]):
        raise BadShards(f"tensor {name} has shape {list(array.shape)}, the model says {list(shapes[name])}")
    return array

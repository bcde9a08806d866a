"""Full tensors to the shards of a layout, one shard at a time. A shard that is one piece is a view of the full tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from syncline.contract.sharding.cuts import Shapes
from syncline.contract.sharding.grid import BadLayout
from syncline.contract.sharding.layout import Layout
from syncline.contract.sharding.pieces import Shard, check, shards
from syncline.sync.reshard.arrays import Array, equal, region, zeros


class BadShards(ValueError):
    """Shards or full tensors that do not fit their layout or their stamps. Names tensor and rank."""


def scatter(
    full: Mapping[str, Array], layout: Layout, ranks: Iterable[int] | None = None
) -> dict[int, dict[str, Array]]:
    """Rank index -> parameter name -> shard, for `ranks` (None: all). Raises as `scattered` does."""
    wanted = tuple(range(layout.grid.size) if ranks is None else ranks)
    out: dict[int, dict[str, Array]] = {index: {} for index in wanted}
    shapes = {name: tuple(array.shape) for name, array in full.items()}
    for shard, array in scattered(full, shapes, layout, wanted):
        out[shard.rank.index][shard.name] = array
    return out


def scattered(
    full: Mapping[str, Array], shapes: Shapes, layout: Layout, ranks: Iterable[int]
) -> Iterator[tuple[Shard, Array]]:
    """Each shard of `ranks` with its array, rank by rank.

    full    looked up when a shard is made, so that it may be a mapping that reads or gathers
    shapes  checkpoint name -> shape of all of them

    Raises `BadLayout` for a layout that does not fit, and `BadShards` for tensors that lie in one place and differ.
    """
    check(layout, shapes)
    for index in ranks:
        for shard in shards(layout, shapes, layout.grid.rank(index)):
            yield shard, made(shard, full)


def made(shard: Shard, full: Mapping[str, Array]) -> Array:
    """The array of `shard` from `full`. Raises `BadShards`."""
    first = full[shard.like]
    if len(shard.pieces) == 1 and shard.pieces[0].source and shard.pieces[0].slot is None and first.ndim:
        piece = shard.pieces[0]
        return region(first, piece.axis, piece.start, piece.stop)
    out = zeros(shard.shape, first)
    for piece in shard.pieces:
        if not piece.source:
            continue  # zeros already
        source = full[piece.source]
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

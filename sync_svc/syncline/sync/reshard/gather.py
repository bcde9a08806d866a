"""Stamped shards of a layout to full tensors, one full tensor at a time.

Each shard's bytes are hashed and compared with what its rank stamped, so that two shards of equal shape that were
exchanged on the way are found. Replicas are compared by digest; the first is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from syncline.contract.sharding.cuts import Piece
from syncline.contract.sharding.layout import Layout
from syncline.contract.sharding.pieces import Shard, Sharding
from syncline.contract.sharding.stamps import ExportStamp, ShardStamp
from syncline.sync.reshard.arrays import WIDTHS, Array, digest, dtype_of, equal, region, zeros
from syncline.sync.reshard.scatter import BadShards

Held = Mapping[int, Mapping[str, Array]]
"""Rank index -> parameter name -> array. May read lazily: arrays are looked up once for the stamp, once per use."""


def stamps(held: Held, layout: Layout) -> ExportStamp:
    """What the ranks would stamp on `held`. Raises `BadLayout` for a rank that the grid does not have."""
    return ExportStamp(
        layout=layout.digest(),
        shards=tuple(
            ShardStamp(
                rank=layout.grid.rank(index),
                tensor=name,
                dtype=dtype_of(array),
                shape=tuple(array.shape),
                digest=digest(array),
            )
            for index, tensors in sorted(held.items())
            for name, array in sorted(tensors.items())
        ),
    )


def gather(held: Held, stamped: ExportStamp, sharding: Sharding) -> dict[str, Array]:
    """All full tensors by checkpoint name. Arguments and errors are those of `Gathering`."""
    whole = Gathering(held, stamped, sharding)
    return {name: whole[name] for name in whole}


class Gathering(Mapping[str, Array]):
    """Full tensors, each put together when it is asked for: a mapping that `scattered` can read from.

    held     shards of some ranks: of each piece of each full tensor at least one; a rank that is there is complete
    stamped  the stamps of at least these
    A tensor that is one whole shard is that shard, without a copy. Raises `BadLayout` for a layout that does not fit
    the model or the stamps; `BadShards` naming tensor and rank for a shard that is missing, has another shape, was not
    stamped or is not what was stamped, replicas that differ, and padding that is not zero under `padding = "zero"`.
    """

    def __init__(self, held: Held, stamped: ExportStamp, sharding: Sharding) -> None:
        sharding.check()
        self._held, self._sharding, self._layout = held, sharding, sharding.layout
        self._shapes = shapes = sharding.tensors()
        self._stamps = stamped.by_shard(sharding.layout)
        self._sources: dict[str, list[tuple[Shard, Piece]]] = {name: [] for name in shapes}
        self._empty: dict[str, list[Shard]] = {name: [] for name in shapes}  # shards of padding alone
        self._sound: set[tuple[int, str]] = set()
        replicas: dict[tuple[tuple[Piece, ...], tuple[int, ...]], Shard] = {}
        for index in sorted(held):
            for shard in self._expected(index):
                if not any(piece.source for piece in shard.pieces):
                    self._empty[shard.like].append(shard)
                    continue
                first = replicas.setdefault((shard.pieces, shard.shape), shard)
                self._check_replica(first, shard)
                for piece in shard.pieces:
                    if piece.source:
                        self._sources[piece.source].append((shard, piece))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, name: str) -> Array:
        for shard in self._empty[name]:
            self._array(shard)
        regions: dict[tuple[int, int], tuple[Shard, Piece]] = {}
        for shard, piece in self._sources[name]:
            array = self._array(shard)
            at = (piece.start, piece.stop)
            if at in regions:
                self._check_copy(name, regions[at], (shard, piece), array)
            else:
                regions[at] = shard, piece
        self._check_tiles(name, sorted(regions))
        self.dtype(name)
        return self._joined(name, [regions[at] for at in sorted(regions)])

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the full tensors."""
        return self._shapes

    def is_view(self, name: str) -> bool:
        """Whether full tensor `name` is rows of one shard, so that asking for it copies nothing."""
        pieces = [piece for _, piece in self._sources[name]]
        return len({(piece.start, piece.stop) for piece in pieces}) == 1 and pieces[0].axis == 0

    def dtype(self, name: str) -> str:
        """Safetensors' name of the dtype of full tensor `name`, as all its shards stamped it. Raises `BadShards`."""
        if not self._sources[name]:
            self._check_tiles(name, [])
        first = self._sources[name][0][0]
        for shard, _ in self._sources[name]:
            one, other = (self._stamps[s.rank.index, s.name].dtype for s in (first, shard))
            if one != other:
                raise BadShards(f"tensor {shard}: dtype {other} is stamped, {first} has {one}")
        return self._stamps[first.rank.index, first.name].dtype

    def _expected(self, index: int) -> tuple[Shard, ...]:
        """The shards of rank `index`, which must be there, and no others."""
        expected = self._sharding.on(index)
        there = self._held[index]
        for shard in expected:
            if shard.name not in there:
                raise BadShards(f"tensor {shard}: the shard is missing")
            stamp = self._stamps.get((index, shard.name))
            if stamp is None:
                raise BadShards(f"tensor {shard}: the shard is not stamped")
            if stamp.dtype not in WIDTHS:
                raise BadShards(
                    f"tensor {shard}: dtype {stamp.dtype} is stamped; known are {', '.join(WIDTHS)}"
                )
            if stamp.shape != shard.shape:
                raise BadShards(
                    f"tensor {shard}: shape {list(stamp.shape)} is stamped, {list(shard.shape)} is right"
                )
        if more := sorted(there.keys() - {shard.name for shard in expected}):
            raise BadShards(
                f"tensor {more[0]} on {self._layout.grid.rank(index)}: the layout has no such shard there"
            )
        return expected

    def _check_replica(self, first: Shard, shard: Shard) -> None:
        one, other = (self._stamps[s.rank.index, s.name] for s in (first, shard))
        if (one.digest, one.dtype) != (other.digest, other.dtype):
            raise BadShards(
                f"tensor {shard} has digest {other.digest} ({other.dtype}), its replica {first} "
                f"{one.digest} ({one.dtype})"
            )

    def _array(self, shard: Shard) -> Array:
        """The array of `shard`, hashed when it is first asked for."""
        array = self._held[shard.rank.index][shard.name]
        key = (shard.rank.index, shard.name)
        if key in self._sound:
            return array
        if tuple(array.shape) != shard.shape:
            raise BadShards(f"tensor {shard}: shape {list(array.shape)}, {list(shard.shape)} is right")
        stamp = self._stamps[key]
        if array.dtype.itemsize != WIDTHS[stamp.dtype]:
            raise BadShards(f"tensor {shard}: dtype {array.dtype}, {stamp.dtype} is stamped")
        found = digest(array)
        if found != stamp.digest:
            raise BadShards(f"tensor {shard}: digest {found}, stamped {stamp.digest}{self._owner(found)}")
        if self._layout.padding == "zero":
            _check_padding(shard, array)
        self._sound.add(key)
        return array

    def _owner(self, found: str) -> str:
        """Whose shard this is, if it is another's."""
        for stamp in self._stamps.values():
            if stamp.digest == found:
                return f"; these are the bytes of {stamp.tensor} on {stamp.rank}"
        return ""

    def _check_copy(
        self, name: str, first: tuple[Shard, Piece], other: tuple[Shard, Piece], array: Array
    ) -> None:
        """Two shards that both hold this piece of `name` hold the same."""
        if (first[0].pieces, first[0].shape) == (other[0].pieces, other[0].shape):
            return  # compared by digest
        if not equal(_part(self._array(first[0]), first[1]), _part(array, other[1])):
            one, two = first[1], other[1]
            raise BadShards(
                f"tensor {name}: {one.start} to {one.stop} along axis {two.axis} differ: {first[0]} and {other[0]}"
            )

    def _check_tiles(self, name: str, regions: list[tuple[int, int]]) -> None:
        shape = self._shapes[name]
        pieces = self._sources[name]
        axis = pieces[0][1].axis if pieces else 0
        at = 0
        for start, stop in [*regions, (shape[axis] if shape else 1,) * 2]:
            if start > at:
                raise BadShards(
                    f"tensor {name}: {at} to {start} along axis {axis} is on no given rank{self._holder(name, at)}"
                )
            if start < at and start != stop:
                raise AssertionError(f"layout {self._layout.digest()}: pieces of {name} overlap at {start}")
            at = max(at, stop)

    def _holder(self, name: str, at: int) -> str:
        for rank in self._layout.grid.ranks():
            for shard in self._sharding.on(rank.index):
                if any(p.source == name and p.start <= at < p.stop for p in shard.pieces):
                    return f"; the missing shard is {shard}"
        return ""

    def _joined(self, name: str, parts: list[tuple[Shard, Piece]]) -> Array:
        views = [_part(self._array(shard), piece) for shard, piece in parts]
        if len(views) == 1:
            return views[0].reshape(self._shapes[name])
        out = zeros(self._shapes[name], views[0])
        for (shard, piece), view in zip(parts, views, strict=True):
            if view.dtype != out.dtype:  # assigning would convert values
                raise BadShards(f"tensor {shard} is held as {view.dtype}, {parts[0][0]} as {out.dtype}")
            region(out, piece.axis, piece.start, piece.stop)[:] = view
        return out


def _part(array: Array, piece: Piece) -> Array:
    return region(array, piece.axis, piece.at, piece.at + piece.stop - piece.start, piece.slot)


def _check_padding(shard: Shard, array: Array) -> None:
    for piece in shard.pieces:
        if not piece.source:
            rows = _part(array, piece) != 0
            if bool(rows.any()):
                row = piece.at + int(rows.reshape(rows.shape[0], -1).any(1).argmax())
                raise BadShards(f"tensor {shard}: padding row {row} is not zero; padding = 'drop' drops it")

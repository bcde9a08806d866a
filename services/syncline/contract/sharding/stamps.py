"""What a trainer says of the shards that it exports. Two shards of equal shape are told apart by nothing else."""

from __future__ import annotations

import msgspec

from syncline.contract.sharding.grid import BadLayout, Rank
from syncline.contract.sharding.layout import Layout


class ShardStamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One shard as its rank holds it. Stamped by that rank, before the bytes leave it."""

    rank: Rank
    tensor: str  # the parameter's name on the rank
    dtype: str  # safetensors name: "BF16", "F8_E4M3"
    shape: tuple[int, ...]
    digest: str  # sha256 hex of the raw little-endian bytes in C order


class ExportStamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All stamps of one export. `layout`: digest of the layout that the ranks' places are of."""

    layout: str
    shards: tuple[ShardStamp, ...]

    def by_shard(self, layout: Layout) -> dict[tuple[int, str], ShardStamp]:
        """Stamps by rank index and tensor.

        Raises `BadLayout` for stamps of another layout, of a place that is not the rank's, or two of one shard.
        """
        if self.layout != layout.digest():
            raise BadLayout(
                f"the shards are stamped under layout {self.layout}, and this is {layout.digest()}"
            )
        found: dict[tuple[int, str], ShardStamp] = {}
        for stamp in self.shards:
            if (place := layout.grid.rank(stamp.rank.index)) != stamp.rank:
                raise BadLayout(f"tensor {stamp.tensor} is stamped by {stamp.rank}; the grid says {place}")
            if found.setdefault((stamp.rank.index, stamp.tensor), stamp) != stamp:
                raise BadLayout(f"tensor {stamp.tensor} is stamped twice by {stamp.rank}, and differently")
        return found

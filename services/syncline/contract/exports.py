"""What lies in the folder of a version's export, beside `config.json`. All of it is stamped in `Minted.files`.

A whole export has full tensors under checkpoint names in any `*.safetensors`.

A sharded export has `rank-00000.safetensors` for each rank that took part (its index in the trainer's grid, five
digits): the rank's own parameters under the names that `Sharding.on(rank)` gives them, so that two files may carry one
name. `shards.json` (`ShardedExport`) says which layout they are of, the shapes of the full tensors, and what each rank
stamped. A rank takes part with all of its parameters or not at all, and one whose parameters others have as well may
stay away; `runtime/export_files.py` writes both.

A converted export (contract: `convert.place = "trainer_rank"`) holds codes and scales under the names of
`artefact.parts` for each weight that the plan makes low-bit, and everything else as a BF16 rollout holds it.
`converted.json` (`ConvertedExport`) gives the shapes before. An export may be both: ranks then hold the shards of codes
and scales.
"""

from __future__ import annotations

import msgspec

from syncline.contract.sharding.layout import Layout
from syncline.contract.sharding.stamps import ExportStamp, ShardStamp

CONFIG_FILE, SHARDS_FILE, CONVERTED_FILE = "config.json", "shards.json", "converted.json"
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
WIDTHS |= {"F8_E4M3": 1}
"""Bytes per element of the dtypes that an export may hold, by safetensors' name."""


def rank_file(index: int) -> str:
    """Name of the file of rank `index`."""
    return f"rank-{index:05d}.safetensors"


class ShardedExport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`shards.json`. Written by the trainer after all of its ranks.

    shapes   checkpoint name -> shape of the full tensor, as `Sharding` takes them: before quantisation, without a
             tied output head, of the base, of the adapter, or of both
    stamp    of every shard in the ranks' files, and of no other
    """

    layout: Layout
    shapes: dict[str, tuple[int, ...]]
    stamp: ExportStamp


class ConvertedExport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`converted.json`. Written by a trainer that quantises.

    plan     digest of the `PrecisionPlan` that its tensors were made by; sync resolves its own and compares
    shapes   checkpoint name -> shape before quantisation, of every tensor that the plan is of
    """

    plan: str
    shapes: dict[str, tuple[int, ...]]


class RankExport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank says after its file is on disk. Stamped by that rank, collected by the one that ends the export."""

    rank: int
    sha256: str  # of the file, hex
    shards: tuple[ShardStamp, ...]

"""Exports as the ranks of a trainer write them: each its own file, and `shards.json` over all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from sharded import Full

from syncline.contract.exports import ShardedExport
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.runtime.export_files import finish, stamp_of, write_rank
from syncline.sync.reshard.scatter import scatter


def config_of(dims: Dimensions) -> dict[str, Any]:
    """What of config.json the layout is checked against."""
    found: dict[str, Any] = {
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "tie_word_embeddings": dims.tied,
    }
    if dims.experts:
        found["num_experts"] = dims.experts
    if dims.latent:
        found["kv_lora_rank"] = 10
    return found


def write_shards(
    folder: Path,
    full: Full,
    layout: Layout,
    dtype: str,
    ranks: Iterable[int] | None = None,
    config: dict[str, Any] | None = None,
) -> dict[str, str]:
    """Cut `full` (its elements are `dtype`'s) and write what `ranks` hold; the stamped digests."""
    wrote = [
        write_rank(
            folder,
            layout,
            index,
            {name: (dtype, tuple(array.shape)) for name, array in held.items()},
            ((name, np.ascontiguousarray(array).data) for name, array in held.items()),
        )
        for index, held in scatter(full, layout, ranks).items()
    ]
    shapes = {name: tuple(array.shape) for name, array in full.items()}
    export = ShardedExport(layout=layout, shapes=shapes, stamp=stamp_of(layout, wrote))
    return finish(folder, export, wrote, json.dumps(config or config_of(layout.model)).encode())

"""A rank's shard of low-bit weights as its shards of codes and scales: what cutting the whole artefact gives it.

Cuts lie on the edges of blocks (`Sharding` refuses others), so that each piece of a full tensor quantises by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from syncline.contract.artefact import Part, parts
from syncline.contract.plan import PlanEntry
from syncline.contract.sharding.cuts import Piece
from syncline.contract.sharding.pieces import Shard
from syncline.numerics.checkpoint import NUMPY, encoded_parts

Made = list[dict[str, np.ndarray[Any, Any]]]
"""For each piece of a shard, what it becomes, by role."""


def shard_codes(
    held: torch.Tensor,
    wide: Shard,
    low: tuple[Shard, ...],
    entries: Mapping[str, PlanEntry],
    outer: Mapping[str, torch.Tensor],
) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Dtype and array of each of the shards `low` that `held`, which is `wide`, becomes (`Sharding.pairs`).

    entries   the plan's, by checkpoint name
    outer     nvfp4: outer scale by checkpoint name, of the whole tensor and its partners; ranks agree on it beforehand

    Raises `NotQuantizable` naming the tensor.
    """
    named = {part.name: part for piece in wide.pieces for part in parts(entries[piece.source])}
    made: Made = []
    for piece in wide.pieces:
        entry = entries[piece.source]
        view = held if piece.slot is None else held[piece.slot]
        view = view.narrow(piece.axis, piece.at, piece.stop - piece.start)
        n, k = view.shape
        own = msgspec.structs.replace(entry, shape=(n, k))
        done = encoded_parts(lambda first, last, view=view: view[first:last], own, outer.get(entry.name))  # type: ignore[misc]
        made.append({part.role: array for part, array in done})
    return {shard.name: _laid(shard, wide.pieces, named, entries, made) for shard in low}


def _laid(
    shard: Shard,
    pieces: tuple[Piece, ...],
    named: Mapping[str, Part],
    entries: Mapping[str, PlanEntry],
    made: Made,
) -> tuple[str, np.ndarray[Any, Any]]:
    first = named[shard.like]
    if first.role == "shape":  # of the whole weight, on every rank
        return first.dtype, np.array(entries[first.source].shape, "<i8")
    out = np.zeros(shard.shape, NUMPY[first.dtype])
    for moved, piece, found in zip(shard.pieces, pieces, made, strict=True):
        assert named[moved.source].source == piece.source
        lead: tuple[Any, ...] = () if moved.slot is None else (moved.slot,)
        if first.role == "outer":
            out[lead if out.ndim == len(lead) else (*lead, moved.at)] = found[first.role]
            continue
        where = slice(moved.at, moved.at + moved.stop - moved.start)
        out[(*lead, *(slice(None),) * moved.axis, where)] = found[first.role]
    return first.dtype, out

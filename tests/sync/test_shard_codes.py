"""A rank that quantises its own shards writes what cutting the quantised whole gives it, and sync takes it as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from exports import write
from shard_exports import config_of
from sharded import model

from syncline.contract.exports import CONVERTED_FILE, ConvertedExport, ShardedExport
from syncline.contract.plan import PrecisionPlan, resolve
from syncline.contract.precision import Convert, Family, PrecisionContract
from syncline.contract.schemes import SCHEMES
from syncline.contract.sharding.grid import BadLayout, Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.contract.sharding.pieces import Sharding
from syncline.numerics.checkpoint import outer_groups, outer_of
from syncline.numerics.shard_codes import shard_codes
from syncline.runtime.export_files import finish, stamp_of, write_file, write_rank
from syncline.runtime.store import BlobStore
from syncline.sync.convert import Converted, convert
from syncline.sync.export import BadExport, Export
from syncline.sync.reshard.scatter import scatter
from syncline.sync.source import source_of

DIMS = Dimensions(layers=2, heads=4, kv_heads=2, experts=2)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LAYOUTS = {
    "tp": Layout(engine="megatron_local", grid=Grid(tp=2), model=DIMS),
    "ep": Layout(engine="megatron_te", grid=Grid(tp=2, ep=2, etp=1), model=DIMS, experts_of=((1,), (0,))),
    "sglang": Layout(engine="sglang", grid=Grid(tp=2, etp=2), model=DIMS),
}


def contract_of(scheme: str) -> PrecisionContract:
    fuse = FUSED if scheme == "nvfp4" else ()
    family = Family(name="low", match=("*_proj.weight",), weight=SCHEMES[scheme], fuse=fuse)
    return PrecisionContract(name="low", families=(family,))


def bits() -> dict[str, np.ndarray[Any, Any]]:
    shapes = model(DIMS, vocab=64, width=128, ffn=256, hidden=128)
    rng = np.random.default_rng(7)
    return {
        name: (rng.standard_normal(shape).astype("<f4").view("<u4") >> 16).astype("<u2")
        for name, shape in shapes.items()
    }


def bf16(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).view("<i2")).view(torch.bfloat16)


def outer_scales(plan: PrecisionPlan, full: dict[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    """What ranks would agree on by exchanging their largest magnitudes."""
    found: dict[str, torch.Tensor] = {}
    for group in outer_groups(plan.low_bit()):
        largest = [float(bf16(full[entry.name]).float().abs().max()) for entry in group]
        found |= {entry.name: outer_of(largest, entry) for entry in group}
    return found


def quantised_on_ranks(
    folder: Path, full: dict[str, np.ndarray[Any, Any]], layout: Layout, plan: PrecisionPlan
) -> dict[str, str]:
    """Each rank cuts its shards of the BF16 weights, quantises them on its own and writes them."""
    shapes = {name: tuple(array.shape) for name, array in full.items()}
    sharding = Sharding(layout, shapes, plan)
    entries, outer = {entry.name: entry for entry in plan.entries}, outer_scales(plan, full)
    ranks = []
    for index, held in scatter(full, layout).items():
        made: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
        for wide, low in sharding.pairs(index):
            array = held[wide.name]
            made |= (
                shard_codes(bf16(array), wide, low, entries, outer) if low else {wide.name: ("BF16", array)}
            )
        facts = {name: (dtype, tuple(array.shape)) for name, (dtype, array) in made.items()}
        data = ((name, np.ascontiguousarray(array).data) for name, (_, array) in made.items())
        ranks.append(write_rank(folder, layout, index, facts, data))
    told = ConvertedExport(plan=plan.digest(), shapes=shapes)
    config = json.dumps(config_of(DIMS)).encode()
    files = finish(
        folder, ShardedExport(layout=layout, shapes=shapes, stamp=stamp_of(layout, ranks)), ranks, config
    )
    return files | {CONVERTED_FILE: write_file(folder / CONVERTED_FILE, msgspec.json.encode(told))}


def converted(folder: Path, files: dict[str, str], contract: PrecisionContract, store: Path) -> Converted:
    export = Export(folder, files)
    try:
        return convert(source_of(export, contract), contract, BlobStore(store))
    finally:
        export.close()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("scheme", ["fp8_block", "int4_g32", "mxfp8", "mxfp4", "nvfp4"])
def test_ranks_quantise_what_sync_would(tmp_path: Path, layout: Layout, scheme: str) -> None:
    """Attention too, whose rows Megatron interleaves by query groups: heads here are as long as FP8's blocks."""
    full, contract = bits(), contract_of(scheme)
    parts: dict[str, Any] = {name: ("bfloat16", array) for name, array in full.items()}
    whole = converted(
        tmp_path / "w", write(tmp_path / "w", parts, config_of(DIMS)), contract, tmp_path / "one"
    )
    there = msgspec.structs.replace(contract, convert=Convert(place="trainer_rank"))
    plan = resolve(there, {name: tuple(array.shape) for name, array in full.items()})
    files = quantised_on_ranks(tmp_path / "s", full, layout, plan)
    done = converted(tmp_path / "s", files, there, tmp_path / "two")
    assert (done.tensors, done.padding, done.ties) == (whole.tensors, whole.padding, whole.ties)
    assert done.trace == msgspec.structs.replace(whole.trace, place="trainer_rank")


def test_a_block_that_query_groups_cut_is_refused(tmp_path: Path) -> None:
    """Heads of 64 rows, blocks of 128: k's rows of one group are half a block."""
    shapes = model(DIMS, vocab=64, width=64, ffn=256, hidden=128)
    sharding = Sharding(LAYOUTS["tp"], shapes, resolve(contract_of("fp8_block"), shapes))
    with pytest.raises(BadLayout, match=r"k_proj.weight: .*linear_qkv.weight interleaves rows 0 to 64 of it"):
        sharding.on(0)


def test_wide_shards_under_a_contract_of_ready_ones_are_refused(tmp_path: Path) -> None:
    full, contract = bits(), contract_of("mxfp8")
    plan = resolve(contract, {name: tuple(array.shape) for name, array in full.items()})
    files = quantised_on_ranks(tmp_path / "s", full, LAYOUTS["tp"], plan)
    with pytest.raises(BadExport, match=r"the export is converted, .*convert.place 'sync'"):
        converted(tmp_path / "s", files, contract, tmp_path / "store")

"""The layouts against the engine itself: shards that Megatron's own distributed checkpoint has cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from sharded import model

from syncline.contract.sharding.grid import Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.contract.sharding.pieces import Sharding
from syncline.sync.reshard.arrays import equal
from syncline.sync.reshard.gather import gather, stamps
from syncline.sync.reshard.scatter import scatter

GOLDEN = Path(__file__).with_name("golden_shards")
CASES = sorted(path for path in GOLDEN.glob("*/tp*"))


def read(case: Path) -> tuple[Layout, dict[int, dict[str, Any]], dict[int, dict[str, int]]]:
    """Layout, what each rank held, and the place that Megatron gave it."""
    held, places, sizes = {}, {}, {}
    for path in case.iterdir():
        index = int(path.stem.removeprefix("rank-"))
        held[index] = load_file(path)
        with safe_open(path, "np") as file:
            places[index] = json.loads(file.metadata()["place"])
            sizes = json.loads(file.metadata()["layout"])
    name = sizes.pop("model")
    dims = Dimensions(
        layers=2,
        heads=4,
        kv_heads=2,
        experts=0 if name == "dense" else 4,
        latent=name == "mla",
        tied=name == "dense",
    )
    grid = Grid(**sizes)
    return Layout(engine="megatron_local", grid=grid, model=dims, vocab=8 // grid.tp), held, places


def test_there_are_golden_shards() -> None:
    assert len(CASES) == 8


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_shards_are_megatrons(case: Path) -> None:
    """Names, shapes, values and places of all ranks, in both directions."""
    layout, held, places = read(case)
    full = load_file(case.parent / "full.safetensors")
    for index, place in places.items():
        rank = layout.grid.rank(index)
        assert {"pp": rank.pp, "tp": rank.tp, "ep": rank.ep, "etp": rank.etp} == place
    made = scatter(full, layout)
    assert {i: made[i].keys() for i in made} == {i: held[i].keys() for i in made}
    different = [(i, n) for i in made for n in made[i] if not equal(made[i][n], held[i][n])]
    assert not different
    shapes = {name: array.shape for name, array in full.items()}
    back = gather(held, stamps(held, layout), Sharding(layout, shapes))
    assert back.keys() == full.keys()
    assert all(equal(back[name], full[name]) for name in full)


@pytest.mark.parametrize("latent", [False, True])
def test_transformer_engine_layers_as_read(latent: bool) -> None:
    """No GPU here: names and shapes as `gpt_layer_specs.py` and TE's modules have them, not as they were run."""
    dims = Dimensions(layers=2, heads=4, kv_heads=2, experts=4, latent=latent)
    layout = Layout(engine="megatron_te", grid=Grid(tp=2, ep=2, etp=1), model=dims, vocab=20)
    held = {shard.name: shard.shape for shard in Sharding(layout, model(dims)).on(1)}
    layers = "decoder.layers."
    for name, shape in {
        f"{layers}0.mlp.linear_fc1.layer_norm_weight": (6,),
        f"{layers}0.mlp.linear_fc1.weight": (12, 6),
        f"{layers}1.pre_mlp_layernorm.weight": (6,),
        f"{layers}1.mlp.experts.linear_fc1.weight1": (24, 6),
        f"{layers}1.mlp.experts.linear_fc2.weight0": (6, 12),
        f"{layers}1.mlp.shared_experts.linear_fc1.weight": (24, 6),
        f"{layers}1.mlp.router.expert_bias": (4,),
    }.items():
        assert held[name] == shape
    attention = f"{layers}1.self_attention."
    only_latent = {
        f"{attention}linear_q_down_proj.weight": (12, 6),
        f"{attention}linear_kv_down_proj.weight": (12, 6),
        f"{attention}linear_q_up_proj.layer_norm_weight": (12,),
        f"{attention}linear_kv_up_proj.layer_norm_weight": (10,),
        f"{attention}linear_kv_up_proj.weight": (10, 10),
        f"{layers}1.input_layernorm.weight": (6,),
    }
    only_heads = {
        f"{attention}linear_qkv.layer_norm_weight": (6,),
        f"{attention}linear_qkv.weight": (8, 6),
        f"{attention}q_layernorm.weight": (2,),
    }
    for name, shape in (only_latent if latent else only_heads).items():
        assert held[name] == shape
    assert not (only_heads if latent else only_latent).keys() & held.keys()
    assert f"{layers}1.mlp.linear_fc1.layer_norm_weight" not in held
    assert f"{layers}0.pre_mlp_layernorm.weight" not in held

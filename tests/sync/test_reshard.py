"""Gathering undoes scattering under every layout, and what does not fit is refused by tensor and rank."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import DENSE, MOE, Full, Shapes, adapted, dimensions, model, numbered, rollouts, trainers

from syncline.contract.sharding.grid import BadLayout, Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.contract.sharding.layout import dimensions as read_dimensions
from syncline.contract.sharding.pieces import Sharding
from syncline.sync.reshard.arrays import equal
from syncline.sync.reshard.gather import Gathering, gather, stamps
from syncline.sync.reshard.scatter import BadShards, scatter, scattered

Held = dict[int, dict[str, Any]]


def shapes_of(full: Full) -> Shapes:
    return {name: tuple(array.shape) for name, array in full.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


def with_adapters(shapes: Shapes, layout: Layout, draw: Any) -> Full:
    """A model, its adapter or both; under a shared A, the projections of one matrix have the same one."""
    which = draw(st.sampled_from(["base", "adapter", "both"]))
    found = (shapes if which != "adapter" else {}) | (adapted(shapes) if which != "base" else {})
    full = numbered(found)
    for name in full:
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            if layout.adapters == "shared" and name.endswith(f"{first}.lora_A.weight"):
                for other in others:
                    if (partner := name.replace(first, other)) in full:
                        full[partner] = full[name].copy()
    return full


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_gathering_undoes_scattering(data: st.DataObject) -> None:
    """Trainer and rollout layouts; bases, adapters and both."""
    dims = data.draw(dimensions())
    layout = data.draw(st.one_of(trainers(dims), rollouts(dims)))
    full = with_adapters(model(dims, vocab=data.draw(st.integers(1, 70))), layout, data.draw)
    held = scatter(full, layout)
    assert same(gather(held, stamps(held, layout), Sharding(layout, shapes_of(full))), full)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_from_trainer_to_rollout_is_a_scatter(data: st.DataObject) -> None:
    dims = data.draw(dimensions())
    trainer, rollout = data.draw(trainers(dims)), data.draw(rollouts(dims))
    full = with_adapters(model(dims, latent_q=data.draw(st.booleans())), trainer, data.draw)
    held = scatter(full, trainer)
    whole = Gathering(held, stamps(held, trainer), Sharding(trainer, shapes_of(full)))
    out: Held = {rank.index: {} for rank in rollout.grid.ranks()}
    for shard, array in scattered(whole, Sharding(rollout, shapes_of(full)), out):
        out[shard.rank.index][shard.name] = array
    direct = scatter(full, rollout)
    assert out.keys() == direct.keys()
    assert all(same(out[i], direct[i]) for i in out)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_some_replica_of_each_piece_is_enough(data: st.DataObject) -> None:
    """With the data-parallel copies gone nothing is missing; with one rank more gone, a tensor and a rank are named."""
    dims = data.draw(dimensions())
    layout = data.draw(trainers(dims))
    full = numbered(model(dims))
    held = scatter(full, layout)
    sharding = Sharding(layout, shapes_of(full))
    contents = {i: {(s.pieces, s.shape) for s in sharding.on(i) if s.pieces[0].source} for i in held}
    for index in data.draw(st.permutations(sorted(held))):
        others = set().union(*(contents[i] for i in held if i != index))
        if contents[index] <= others:
            del held[index]
    assert same(gather(held, stamps(held, layout), sharding), full)
    if len(held) > 1:
        gone = data.draw(st.sampled_from(sorted(held)))
        del held[gone]
        with pytest.raises(
            BadShards, match=r"tensor \S+: .* is on no given rank; the missing shard is .* on rank"
        ):
            gather(held, stamps(held, layout), sharding)


SMALL = Layout(engine="megatron_local", grid=Grid(tp=2, ep=2, etp=1), model=MOE, vocab=20)


def test_every_exchange_of_two_shards_is_found() -> None:
    """All pairs of equal shape and different bytes, between ranks and within one."""
    full = numbered(model(MOE))
    held, sharding = scatter(full, SMALL), Sharding(SMALL, shapes_of(full))
    stamped = stamps(held, SMALL)
    places = [(index, name) for index in held for name in held[index]]
    found = 0
    for (i, a), (j, b) in itertools.combinations(places, 2):
        one, other = held[i][a], held[j][b]
        if one.shape != other.shape or equal(one, other):
            continue
        changed = {index: dict(tensors) for index, tensors in held.items()}
        changed[i][a], changed[j][b] = other, one
        with pytest.raises(BadShards, match=r"digest .*, stamped .*; these are the bytes of") as caught:
            gather(changed, stamped, sharding)
        assert f"tensor {a} on rank {i} " in str(caught.value) or f"tensor {b} on rank {j} " in str(
            caught.value
        )
        found += 1
    assert found > 100


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_an_exchange_is_found_under_every_layout(data: st.DataObject) -> None:
    dims = data.draw(dimensions())
    layout = data.draw(st.one_of(trainers(dims), rollouts(dims)))
    full = numbered(model(dims))
    held = scatter(full, layout)
    stamped = stamps(held, layout)
    pairs = [
        (i, a, j, b)
        for (i, a), (j, b) in itertools.combinations([(i, n) for i in held for n in held[i]][:60], 2)
        if held[i][a].shape == held[j][b].shape and not equal(held[i][a], held[j][b])
    ]
    if pairs:
        i, a, j, b = data.draw(st.sampled_from(pairs))
        held[i][a], held[j][b] = held[j][b], held[i][a]
        with pytest.raises(BadShards, match="stamped"):
            gather(held, stamped, Sharding(layout, shapes_of(full)))


def broken(what: str) -> tuple[Held, Layout, Shapes]:
    """Shards of `SMALL` with one fault, stamped as they are."""
    full = numbered(model(MOE))
    held = {i: {n: np.array(a) for n, a in tensors.items()} for i, tensors in scatter(full, SMALL).items()}
    layout = SMALL
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    match what:
        case "missing":
            del held[1][qkv]
        case "shape":
            held[1][qkv] = held[1][qkv][:-1]
        case "extra":
            held[1]["decoder.layers.0.self_attention.linear_q.weight"] = held[1][qkv]
        case "replica":
            held[1]["decoder.layers.0.input_layernorm.weight"][2] += 1
        case "padding":
            held[1]["output_layer.weight"][-2, 1] = 7
        case "empty padding":
            # 37 rows in two parts of 40: all of the second part is padding
            layout = msgspec.structs.replace(SMALL, vocab=40)
            held = {i: {n: np.array(a) for n, a in t.items()} for i, t in scatter(full, layout).items()}
            held[1]["output_layer.weight"][3, 1] = 7
        case "dtype":
            held[1][qkv] = held[1][qkv].astype(np.int32)
        case "rank":
            held[2] = held[1]
    return held, layout, shapes_of(full)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "missing",
            r"tensor decoder.layers.0.self_attention.linear_qkv.weight on rank 1 \(pp 0, tp 1, ep 1, etp 0\): the",
        ),
        ("shape", r"linear_qkv.weight on rank 1 .*: shape \[7, 6\] is stamped, \[8, 6\] is right"),
        ("extra", r"tensor decoder.layers.0.self_attention.linear_q.weight on rank 1 .* no such shard there"),
        (
            "replica",
            r"input_layernorm.weight on rank 1 .* has digest \w{64} \(I64\), its replica \S+ on rank 0 .* \w{64} ",
        ),
        ("padding", r"tensor output_layer.weight on rank 1 .*: padding row 18 is not zero"),
        ("empty padding", r"tensor output_layer.weight on rank 1 .*: padding row 3 is not zero"),
        ("dtype", r"linear_qkv.weight on rank 1 .*: dtype I32 is stamped, .* on rank 0 .* has I64"),
    ],
)
def test_faults_are_named(what: str, message: str) -> None:
    held, layout, shapes = broken(what)
    with pytest.raises(BadShards, match=message):
        gather(held, stamps(held, layout), Sharding(layout, shapes))


def test_a_rank_beyond_the_grid_is_refused() -> None:
    held, layout, _ = broken("rank")
    with pytest.raises(BadLayout, match="rank 2: the grid has ranks 0 to 1"):
        stamps(held, layout)


def test_padding_may_be_dropped() -> None:
    held, layout, shapes = broken("padding")
    layout = msgspec.structs.replace(layout, padding="drop")
    assert same(gather(held, stamps(held, layout), Sharding(layout, shapes)), numbered(model(MOE)))


def test_stamps_are_of_this_layout_and_of_these_places() -> None:
    full = numbered(model(MOE))
    held, sharding = scatter(full, SMALL), Sharding(SMALL, shapes_of(full))
    good = stamps(held, SMALL)
    other = msgspec.structs.replace(SMALL, experts_of=((0, 2), (1, 3)))
    with pytest.raises(BadLayout, match=r"stamped under layout \w{64}, and this is"):
        gather(held, stamps(held, other), sharding)
    first = good.shards[0]
    moved = msgspec.structs.replace(first, rank=msgspec.structs.replace(first.rank, tp=1))
    with pytest.raises(
        BadLayout, match=rf"tensor {first.tensor} is stamped by rank 0 \(pp 0, tp 1, .*; the grid says"
    ):
        gather(held, msgspec.structs.replace(good, shards=(moved, *good.shards[1:])), sharding)
    twice = msgspec.structs.replace(first, digest="0" * 64)
    with pytest.raises(BadLayout, match="stamped twice by rank 0"):
        gather(held, msgspec.structs.replace(good, shards=(*good.shards, twice)), sharding)
    with pytest.raises(BadShards, match=rf"tensor {first.tensor} on rank 0 .*: the shard is not stamped"):
        gather(held, msgspec.structs.replace(good, shards=good.shards[1:]), sharding)


MEGATRON: Any = {"engine": "megatron_local"}
HEADS_6, HEADS_8 = (Dimensions(layers=2, heads=h, kv_heads=k) for h, k in ((6, 2), (8, 8)))


@pytest.mark.parametrize(
    ("grid", "dims", "more", "message"),
    [
        (
            {"tp": 3},
            DENSE,
            {"engine": "sglang"},
            r"q_proj.weight: tp 3 does not divide its 4 heads; legal: 1, 2, 4$",
        ),
        (
            {"tp": 3},
            HEADS_6,
            {"engine": "sglang"},
            r"k_proj.weight: tp 3 .* 2 kv heads; legal: 1, 2, or a multiple of 2",
        ),
        ({"tp": 3}, DENSE, MEGATRON, r"tp 3 does not divide 4 heads in 2 query groups; legal: 1, 2, 4"),
        ({"tp": 8}, HEADS_8, MEGATRON, r"gate_proj.weight: tp 8 .* its 12 rows; legal: 1, 2, 3, 4, 6, 12"),
        ({"pp": 3}, DENSE, MEGATRON, r"pp 3 does not divide 2 layers; legal: 1, 2, or state stages"),
        (
            {"pp": 2},
            DENSE,
            MEGATRON | {"stages": (1, 2)},
            r"stages \[1, 2\]: they must be 2 and hold 2 layers",
        ),
        ({"ep": 3, "dp": 3}, MOE, MEGATRON, r"ep 3 does not divide 4 experts; legal: 1, 2, 4"),
        ({"ep": 2, "etp": 2, "tp": 2}, MOE, MEGATRON, r"etp 2 x ep 2 does not divide the 2 ranks of a stage"),
        ({"tp": 0}, MOE, MEGATRON, r"tp 0: use at least 1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(grid: Any, dims: Dimensions, more: Any, message: str) -> None:
    def refused() -> None:
        Sharding(Layout(grid=Grid(**grid), model=dims, **more), model(dims)).check()

    with pytest.raises(BadLayout, match=message):
        refused()


@pytest.mark.parametrize(
    ("experts_of", "message"),
    [
        (((0, 1), (1, 2)), "expert 1 is on ep rank 0 and on ep rank 1"),
        (((0, 1), (2,)), "expert 3 is on no ep rank"),
        (((0, 1), (2, 4)), "expert 4 on ep rank 1: the model has experts 0 to 3"),
        (((0, 1, 2, 3),), "experts_of has 1 ranks, ep is 2"),
    ],
)
def test_each_expert_is_on_one_rank(experts_of: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(BadLayout, match=message):
        Layout(engine="megatron_local", grid=Grid(ep=2, dp=2), model=MOE, experts_of=experts_of)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.0.self_attn.rotary.weight": (3,)},
            "rotary.weight: megatron_local has no rule for it$",
        ),
        (
            {"model.layers.0.self_attn.v_proj.weight": None},
            r"k_proj.weight: .* without model.layers.0.self_attn.v_proj",
        ),
        (
            {"model.layers.1.mlp.experts.2.up_proj.weight": None},
            r"experts.\d.\w+.weight: megatron_local has no rule",
        ),
        (
            {"model.layers.7.input_layernorm.weight": (6,)},
            "layers.7.input_layernorm.weight: megatron_local has no",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight": (12, 5)},
            r"gate_proj.weight \[12, 6\], .*up_proj.weight \[12, 5\] lie",
        ),
        (
            {"model.layers.0.self_attn.k_proj.weight": (5, 6)},
            "k_proj.weight: 5 values .* no multiple of 2 kv_heads",
        ),
    ],
)
def test_models_that_the_layout_does_not_know_are_refused(change: Any, message: str) -> None:
    shapes = {k: v for k, v in (model(MOE) | change).items() if v is not None}
    with pytest.raises(BadLayout, match=message):
        Sharding(SMALL, shapes).check()


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, np.uint16), (torch.float8_e4m3fn, np.uint8)])
def test_torch_tensors_are_cut_alike(dtype: torch.dtype, width: Any) -> None:
    """BF16 and FP8 tensors and numpy's integers of their width give the same bytes, under the same stamps."""
    full = numbered(model(MOE))
    drop = msgspec.structs.replace(SMALL, padding="drop")
    bits = {name: array.astype(width) for name, array in full.items()}
    as_torch = {name: torch.from_numpy(array).view(dtype) for name, array in bits.items()}
    one, other = scatter(bits, drop), scatter(as_torch, drop)
    stamped = stamps(other, drop)
    assert {(s.rank, s.tensor): s.digest for s in stamped.shards} == {
        (s.rank, s.tensor): s.digest for s in stamps(one, drop).shards
    }
    sharding = Sharding(drop, shapes_of(full))
    assert same(gather(one, stamped, sharding), bits)
    whole = Gathering(other, stamped, sharding)
    assert same(dict(whole), as_torch)
    assert {whole.dtype(name) for name in whole} == {"BF16" if width is np.uint16 else "F8_E4M3"}
    if width is np.uint16:
        as_halves = one | {1: {n: a.view(np.float16) for n, a in one[1].items()}}
        with pytest.raises(BadShards, match=r"on rank 1 .* is held as float16, .* on rank 0 .* as uint16"):
            gather(as_halves, stamped, sharding)
    wide = {i: {n: a.astype(np.uint32) for n, a in tensors.items()} for i, tensors in one.items()}
    with pytest.raises(BadShards, match=r"on rank 0 .*: dtype uint32, (BF16|F8_E4M3) is stamped"):
        gather(wide, stamped, sharding)


def test_nothing_is_copied_without_need() -> None:
    """A part of one tensor is a view of it, and a tensor that is one shard is that shard."""
    full = numbered(model(MOE))
    held = scatter(full, SMALL)
    rows = held[1]["decoder.layers.0.self_attention.linear_proj.weight"]
    assert np.shares_memory(rows, full["model.layers.0.self_attn.o_proj.weight"])
    norm = held[0]["decoder.final_layernorm.weight"]
    back = gather(held, stamps(held, SMALL), Sharding(SMALL, shapes_of(full)))
    assert np.shares_memory(back["model.norm.weight"], norm)


def test_memory_is_that_of_one_shards_sources() -> None:
    """From trainer to rollout layout in the memory of gate_proj and up_proj, two of their shards and the lists."""
    dims = Dimensions(layers=3, heads=4, kv_heads=4)
    shapes = model(dims, vocab=64, width=64, ffn=1024, hidden=512)
    full = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    trainer = Layout(engine="megatron_local", grid=Grid(tp=2, etp=2), model=dims)
    held = scatter(full, trainer)
    stamped = stamps(held, trainer)
    del full
    largest = max(int(np.prod(shape)) for shape in shapes.values()) * 4
    rollout = Sharding(Layout(engine="sglang", grid=Grid(tp=4, etp=4), model=dims), shapes)
    whole = Gathering(held, stamped, Sharding(trainer, shapes))
    tracemalloc.start()
    try:
        for _ in scattered(whole, rollout, range(4)):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3.25 * largest, peak / largest


def test_torch_is_not_loaded_for_it() -> None:
    script = "import sys, syncline.sync.reshard.gather; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_dimensions_come_from_config_json() -> None:
    glm = {"num_hidden_layers": 3, "num_attention_heads": 8, "n_routed_experts": 4, "kv_lora_rank": 16}
    assert read_dimensions(glm) == Dimensions(layers=3, heads=8, kv_heads=8, experts=4, latent=True)
    nested = {"text_config": {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}}
    assert read_dimensions(nested | {"tie_word_embeddings": True}).tied
    with pytest.raises(BadLayout, match="has no num_hidden_layers"):
        read_dimensions({"num_attention_heads": 2})
    with pytest.raises(BadLayout, match="num_key_value_heads is '2'"):
        read_dimensions({"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": "2"})

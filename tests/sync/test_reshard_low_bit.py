"""Codes and scales are cut together, on the edges of blocks: a rank's part is what its part of the weight becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from sharded import model

from syncline.contract.artefact import parts
from syncline.contract.plan import PlanEntry, PrecisionPlan
from syncline.contract.schemes import SCHEMES, Scheme
from syncline.contract.sharding.grid import BadLayout, Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.contract.sharding.pieces import Sharding
from syncline.numerics.quantized import outer_scale, quantize
from syncline.sync.reshard.arrays import equal
from syncline.sync.reshard.gather import gather, stamps
from syncline.sync.reshard.scatter import scattered

Tensors = dict[str, Any]
DIMS = Dimensions(layers=2, heads=4, kv_heads=2, experts=2)
SHAPES = model(DIMS, vocab=64, width=128, ffn=256, hidden=128)
FORMATS = ("fp8_block", "int4_g32", "mxfp8", "mxfp4", "nvfp4")


def plan(scheme: Scheme, shapes: dict[str, tuple[int, ...]] = SHAPES) -> PrecisionPlan:
    """Every projection low-bit, the rest wide."""
    return PrecisionPlan(
        contract="",
        entries=tuple(
            PlanEntry(name=n, shape=s, weight=scheme if n.endswith("_proj.weight") else None, reason="")
            for n, s in sorted(shapes.items())
        ),
    )


def quantised(name: str, weight: torch.Tensor, scheme: Scheme) -> Tensors:
    """`weight` as the artefact's tensors. One outer scale for all, as an engine that fuses reads them."""
    outer = outer_scale([torch.tensor(8.0)], scheme) if scheme.format == "nvfp4" else None
    done = quantize(weight, scheme, name, outer)
    entry = PlanEntry(name=name, shape=tuple(weight.shape), weight=scheme, reason="")
    held = {"codes": done.codes, "scale": done.scale, "outer": outer, "shape": torch.tensor(weight.shape)}
    return {p.name: held[p.role].reshape(p.shape) for p in parts(entry)}  # type: ignore[union-attr]


def artefact(weights: dict[str, torch.Tensor], scheme: Scheme) -> Tensors:
    out: Tensors = {}
    for name, weight in weights.items():
        out |= quantised(name, weight, scheme) if name.endswith("_proj.weight") else {name: weight}
    return out


def weights(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=random).clamp(-8, 8) for name, shape in shapes.items()}


def on_ranks(full: Tensors, sharding: Sharding) -> dict[int, Tensors]:
    held: dict[int, Tensors] = {rank.index: {} for rank in sharding.layout.grid.ranks()}
    for shard, array in scattered(full, sharding, held):
        assert tuple(array.shape) == shard.shape
        held[shard.rank.index][shard.name] = array
    return held


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_cutting_and_quantising_commute(name: str, ep: int) -> None:
    scheme = SCHEMES[name]
    layout = Layout(engine="sglang", grid=Grid(tp=2, ep=ep, etp=2 // ep), model=DIMS, fused=False)
    full = weights()
    held = on_ranks(artefact(full, scheme), Sharding(layout, SHAPES, plan(scheme)))
    wide = on_ranks(full, Sharding(layout, SHAPES))
    for rank, tensors in wide.items():
        expected = artefact({n: t.contiguous() for n, t in tensors.items()}, scheme)
        assert held[rank].keys() == expected.keys()
        for part, array in expected.items():
            if part.endswith("_shape"):
                continue  # it tells of the whole weight
            assert equal(held[rank][part], array), f"{part} on {rank}"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_gathering_undoes_scattering(name: str, fused: bool) -> None:
    scheme = SCHEMES[name]
    full = artefact(weights(), scheme)
    for tp, ep in ((1, 1), (2, 1), (2, 2)):
        layout = Layout(engine="sglang", grid=Grid(tp=tp, ep=ep, etp=tp // ep), model=DIMS, fused=fused)
        sharding = Sharding(layout, SHAPES, plan(scheme))
        held = on_ranks(full, sharding)
        back = gather(held, stamps(held, layout), sharding)
        assert back.keys() == full.keys()
        assert all(equal(back[n], full[n]) for n in full)


def test_the_engines_own_matrices_hold_codes_and_scales_side_by_side() -> None:
    scheme = SCHEMES["nvfp4"]
    layout = Layout(engine="sglang", grid=Grid(tp=2, ep=2, etp=1), model=DIMS)
    full = artefact(weights(), scheme)
    held = on_ranks(full, Sharding(layout, SHAPES, plan(scheme)))[1]
    at = "model.layers.1."
    assert held[f"{at}mlp.experts.w13_weight"].shape == (1, 512, 64)
    assert held[f"{at}mlp.experts.w13_weight_scale"].shape == (1, 512, 8)
    outer = held[f"{at}mlp.experts.w13_weight_scale_2"]
    assert outer.shape == (1, 2)
    assert equal(outer[0, 0], full[f"{at}mlp.experts.1.gate_proj.weight_scale_2"])
    assert held[f"{at}self_attn.qkv_proj.weight_scale_2"].shape == (3,)
    k_scale = held[f"{at}self_attn.qkv_proj.weight_scale"][256:384]
    assert equal(k_scale, full[f"{at}self_attn.k_proj.weight_scale"][128:])


def test_a_replicated_head_is_cut_into_heads_and_not_into_ranks() -> None:
    """With 4 ranks and 2 KV heads of 128 rows, each rank has a head, whole blocks of 128."""
    scheme = SCHEMES["fp8_block"]
    shapes = model(DIMS, vocab=64, width=128, ffn=512, hidden=128)
    layout = Layout(engine="sglang", grid=Grid(tp=4, etp=4), model=DIMS)
    full = artefact(weights(shapes), scheme)
    held = on_ranks(full, Sharding(layout, shapes, plan(scheme, shapes)))
    for rank in range(4):
        scales = held[rank]["model.layers.0.self_attn.qkv_proj.weight_scale_inv"]
        assert scales.shape == (3, 1)
        assert equal(scales[1:2], full["model.layers.0.self_attn.k_proj.weight_scale_inv"][rank // 2 :][:1])


@pytest.mark.parametrize(
    ("name", "tp", "width", "message"),
    [
        (
            "fp8_block",
            4,
            64,
            r"tensor \S+\w_proj.weight: e?tp 4 cuts it into 4 parts inside a block; legal: 1, 2",
        ),
        ("fp8_block", 2, 32, r"tensor \S+q_proj.weight: tp 2 cuts it into 2 parts inside a block; legal: 1"),
        ("int4_g32", 16, 8, r"tensor \S+_proj.weight: e?tp 16 "),
        ("mxfp4", 4, 8, r"tensor \S+o_proj.weight: tp 4 cuts it into 4 parts inside a block; legal: 1"),
    ],
)
def test_cuts_inside_a_block_are_refused(name: str, tp: int, width: int, message: str) -> None:
    dims = Dimensions(layers=1, heads=16 if tp == 16 else 4, kv_heads=2)
    shapes = model(dims, vocab=64, width=width, ffn=512, hidden=128)
    layout = Layout(engine="sglang", grid=Grid(tp=tp, etp=tp), model=dims)
    with pytest.raises(BadLayout, match=message):
        Sharding(layout, shapes, plan(SCHEMES[name], shapes)).check()


def test_what_an_engine_has_in_one_matrix_is_stored_alike() -> None:
    layout = Layout(engine="sglang", grid=Grid(tp=2, etp=2), model=DIMS)
    whole = plan(SCHEMES["mxfp8"])

    def changed(leaf: str, weight: Scheme | None) -> PrecisionPlan:
        entries = [
            msgspec.structs.replace(e, weight=weight) if e.name.endswith(leaf) else e for e in whole.entries
        ]
        return msgspec.structs.replace(whole, entries=tuple(entries))

    for other, message in (
        (
            changed("layers.1.self_attn.v_proj.weight", None),
            r"q_proj.weight is low-bit and \S+v_proj.weight is wide",
        ),
        (
            changed("up_proj.weight", SCHEMES["mxfp4"]),
            r"gate_proj.weight and \S+up_proj.weight have different schemes",
        ),
        (
            changed("experts.1.down_proj.weight", None),
            r"experts.0.down_proj.weight is low-bit, and others in",
        ),
    ):
        with pytest.raises(BadLayout, match=message):
            Sharding(layout, SHAPES, other).check()
    short = msgspec.structs.replace(
        whole, entries=(msgspec.structs.replace(whole.low_bit()[0], shape=(1, 1)),)
    )
    with pytest.raises(BadLayout, match=r"has shape \[\d+, \d+\], the plan \[1, 1\]"):
        Sharding(layout, SHAPES, short)


def test_rows_before_another_part_fill_their_blocks() -> None:
    """192 rows of gate_proj in blocks of 128 end inside a block; up_proj behind them would share its scale."""
    dims = Dimensions(layers=1, heads=4, kv_heads=4)
    shapes = model(dims, vocab=64, width=32, ffn=192, hidden=128)
    fused = Layout(engine="sglang", grid=Grid(), model=dims)
    with pytest.raises(
        BadLayout, match=r"gate_proj.weight: 192 rows of it lie before \S+up_proj.weight .* block of 128"
    ):
        Sharding(fused, shapes, plan(SCHEMES["fp8_block"], shapes)).check()
    Sharding(msgspec.structs.replace(fused, fused=False), shapes, plan(SCHEMES["fp8_block"], shapes)).check()


def test_padded_columns_stay_with_their_rank() -> None:
    """Zeros added to K lie in the last block, which one rank alone has."""
    scheme = msgspec.structs.replace(SCHEMES["mxfp4"], padding="zero")
    dims = Dimensions(layers=1, heads=4, kv_heads=4)
    shapes = model(dims, vocab=64, width=32, ffn=64, hidden=48)
    full = artefact({n: torch.ones(s) for n, s in shapes.items() if len(s) == 1}, scheme)
    random = np.random.default_rng(1)
    for name, shape in shapes.items():
        if len(shape) == 2 and not name.endswith("_proj.weight"):
            full[name] = torch.ones(shape)
        elif len(shape) == 2:
            entry = PlanEntry(name=name, shape=shape, weight=scheme, reason="")
            full |= {
                p.name: torch.from_numpy(random.integers(0, 255, p.shape, np.uint8)) for p in parts(entry)
            }
    layout = Layout(engine="sglang", grid=Grid(tp=2, etp=2), model=dims)
    sharding = Sharding(layout, shapes, plan(scheme, shapes))
    held = on_ranks(full, sharding)
    assert held[0]["model.layers.0.mlp.gate_up_proj.weight_packed"].shape == (
        64,
        32,
    )  # 48 columns, packed as 64
    back = gather(held, stamps(held, layout), sharding)
    assert all(equal(back[n], full[n]) for n in full)

"""What an SGLang rank holds, against slices written out by hand as SGLang 0.5.23's loaders take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import DENSE, MOE, RANK, Full, adapted, dimensions, model, numbered, rollouts

from syncline.contract.sharding.grid import Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.sync.reshard.scatter import scatter

Array = np.ndarray[Any, Any]


def part(array: Array, axis: int, parts: int, index: int) -> Array:
    return np.split(array, parts, axis)[index]


def kv_part(array: Array, dims: Dimensions, tp: int, rank: int) -> Array:
    """QKVParallelLinear.weight_loader: `shard_id = tp_rank // num_kv_head_replicas`."""
    if tp >= dims.kv_heads:
        return part(array, 0, dims.kv_heads, rank // (tp // dims.kv_heads))
    return part(array, 0, tp, rank)


def vocab_part(array: Array, tp: int, rank: int) -> Array:
    """VocabParallelEmbedding: padded to 64, or to 64 tp where tp does not divide that."""
    multiple = 64 if -(-array.shape[0] // 64) * 64 % tp == 0 else 64 * tp
    rows = -(-array.shape[0] // multiple) * multiple
    return part(
        np.concatenate([array, np.zeros((rows - array.shape[0], *array.shape[1:]), array.dtype)]), 0, tp, rank
    )


def qkv(full: Full, at: str, leaf: str, dims: Dimensions, tp: int, rank: int) -> Array:
    q, k, v = (full[f"{at}self_attn.{x}_proj.{leaf}"] for x in "qkv")
    return np.concatenate([part(q, 0, tp, rank), kv_part(k, dims, tp, rank), kv_part(v, dims, tp, rank)])


def merged(full: Full, at: str, leaf: str, tp: int, rank: int) -> Array:
    return np.concatenate([part(full[f"{at}{x}_proj.{leaf}"], 0, tp, rank) for x in ("gate", "up")])


def held_by(full: Full, dims: Dimensions, tp: int, ep: int, rank: int) -> Full:
    """The base's parameters on tp rank `rank` of one pipeline stage."""
    out: Full = {"model.norm.weight": full["model.norm.weight"]}
    out["model.embed_tokens.weight"] = vocab_part(full["model.embed_tokens.weight"], tp, rank)
    if not dims.tied:
        out["lm_head.weight"] = vocab_part(full["lm_head.weight"], tp, rank)
    for layer in range(dims.layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            out[f"{at}{norm}.weight"] = full[f"{at}{norm}.weight"]
        for leaf in ("weight", "bias"):
            out[f"{at}self_attn.qkv_proj.{leaf}"] = qkv(full, at, leaf, dims, tp, rank)
        out[f"{at}self_attn.o_proj.weight"] = part(full[f"{at}self_attn.o_proj.weight"], 1, tp, rank)
        if f"{at}mlp.gate.weight" in full:
            out |= experts(full, at, dims, tp, ep, rank)
        dense = f"{at}mlp." if f"{at}mlp.up_proj.weight" in full else f"{at}mlp.shared_experts."
        out[f"{dense}gate_up_proj.weight"] = merged(full, dense, "weight", tp, rank)
        out[f"{dense}down_proj.weight"] = part(full[f"{dense}down_proj.weight"], 1, tp, rank)
    return out


def experts(full: Full, at: str, dims: Dimensions, tp: int, ep: int, rank: int) -> Full:
    """FusedMoE: `moe_tp = tp / ep`, ep rank `tp_rank // moe_tp`; w13 is gate over up."""
    etp = tp // ep
    each = dims.experts // ep
    local = [f"{at}mlp.experts.{rank // etp * each + slot}." for slot in range(each)]
    return {
        f"{at}mlp.gate.weight": full[f"{at}mlp.gate.weight"],
        f"{at}mlp.gate.e_score_correction_bias": full[f"{at}mlp.gate.e_score_correction_bias"],
        f"{at}mlp.experts.w13_weight": np.stack([merged(full, e, "weight", etp, rank % etp) for e in local]),
        f"{at}mlp.experts.w2_weight": np.stack(
            [part(full[f"{e}down_proj.weight"], 1, etp, rank % etp) for e in local]
        ),
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dims", [DENSE, MOE, Dimensions(layers=1, heads=4, kv_heads=4, tied=True)], ids=str)
def test_base_shards_are_sglangs(dims: Dimensions, tp: int) -> None:
    full = numbered(model(dims, vocab=150))
    for ep in (n for n in (1, 2, 4) if tp % n == 0 and dims.experts % n == 0):
        made = scatter(full, Layout(engine="sglang", grid=Grid(tp=tp, ep=ep, etp=tp // ep), model=dims))
        for rank in range(tp):
            expected = held_by(full, dims, tp, ep, rank)
            assert made[rank].keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(made[rank][name], array, name)


@pytest.mark.parametrize("tp", [3, 6])
def test_a_vocabulary_that_64_does_not_divide_by_tp(tp: int) -> None:
    dims = Dimensions(layers=1, heads=6, kv_heads=3)
    full = numbered(model(dims, vocab=70))
    made = scatter(full, Layout(engine="sglang", grid=Grid(tp=tp, etp=tp), model=dims))
    for rank in range(tp):
        expected = vocab_part(full["lm_head.weight"], tp, rank)
        np.testing.assert_array_equal(made[rank]["lm_head.weight"], expected)
        assert expected.shape == (64, 6)


@pytest.mark.parametrize("latent_q", [True, False])
def test_latent_attention_is_replicated_before_its_heads(latent_q: bool) -> None:
    dims = Dimensions(layers=1, heads=4, kv_heads=4, latent=True)
    full = numbered(model(dims, latent_q=latent_q))
    made = scatter(full, Layout(engine="sglang", grid=Grid(tp=2, etp=2), model=dims))
    at = "model.layers.0.self_attn."
    for rank in range(2):
        held = made[rank]
        down = full[f"{at}kv_a_proj_with_mqa.weight"]
        if latent_q:
            both = np.concatenate([full[f"{at}q_a_proj.weight"], down])
            np.testing.assert_array_equal(held[f"{at}fused_qkv_a_proj_with_mqa.weight"], both)
        else:
            np.testing.assert_array_equal(held[f"{at}kv_a_proj_with_mqa.weight"], down)
        for name in ("q_b_proj" if latent_q else "q_proj", "kv_b_proj"):
            rows = part(full[f"{at}{name}.weight"], 0, 2, rank)
            np.testing.assert_array_equal(held[f"{at}{name}.weight"], rows)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_adapter_shards_are_sglangs(tp: int) -> None:
    """`slice_lora_a_weights` and `slice_lora_b_weights` of each layer class, on stacked A and B."""
    full = numbered(adapted(model(MOE, vocab=128)))
    made = scatter(full, Layout(engine="sglang", grid=Grid(tp=tp, etp=tp), model=MOE))
    at = "model.layers.1."
    experts_at = [f"{at}mlp.experts.{e}." for e in range(4)]
    for rank in range(tp):
        held = made[rank]
        a = "lora_A.weight"
        b = "lora_B.weight"
        expected = {
            f"{at}self_attn.qkv_proj.{a}": np.concatenate(
                [full[f"{at}self_attn.{x}_proj.{a}"] for x in "qkv"]
            ),
            f"{at}self_attn.qkv_proj.{b}": qkv(full, at, b, MOE, tp, rank),
            f"{at}self_attn.o_proj.{a}": part(full[f"{at}self_attn.o_proj.{a}"], 1, tp, rank),
            f"{at}self_attn.o_proj.{b}": full[f"{at}self_attn.o_proj.{b}"],
            f"{at}mlp.experts.w13.{a}": np.stack(
                [np.concatenate([full[f"{e}{x}_proj.{a}"] for x in ("gate", "up")]) for e in experts_at]
            ),
            f"{at}mlp.experts.w13.{b}": np.stack([merged(full, e, b, tp, rank) for e in experts_at]),
            f"{at}mlp.experts.w2.{a}": np.stack(
                [part(full[f"{e}down_proj.{a}"], 1, tp, rank) for e in experts_at]
            ),
            f"{at}mlp.experts.w2.{b}": np.stack([full[f"{e}down_proj.{b}"] for e in experts_at]),
            f"model.embed_tokens.{a}": full[f"model.embed_tokens.{a}"],
            f"model.embed_tokens.{b}": full[f"model.embed_tokens.{b}"],
            f"lm_head.{a}": full[f"lm_head.{a}"],
            f"lm_head.{b}": part(full[f"lm_head.{b}"], 0, tp, rank),
        }
        for name, array in expected.items():
            np.testing.assert_array_equal(held[name], array, name)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_ranks_parts_are_the_engines_own_taken_apart(data: st.DataObject) -> None:
    """`fused = False` holds the same values under checkpoint names."""
    dims = data.draw(dimensions())
    fused = data.draw(rollouts(dims))
    full = numbered(model(dims) | adapted(model(dims), RANK))
    one = scatter(full, Layout(engine="sglang", grid=fused.grid, model=dims))
    other = scatter(full, Layout(engine="sglang", grid=fused.grid, model=dims, fused=False))
    for rank in one:
        mine, theirs = (
            np.sort(np.concatenate([a.reshape(-1) for a in held[rank].values()])) for held in (one, other)
        )
        np.testing.assert_array_equal(mine, theirs)
        assert other[rank].keys() <= full.keys() | {"lm_head.weight"}

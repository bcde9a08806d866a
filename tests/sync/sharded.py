"""Small models and layouts for the resharding tests. Every element has a number of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from syncline.contract.adapters import tensor_names
from syncline.contract.sharding.grid import Grid
from syncline.contract.sharding.layout import Dimensions, Engine, Layout

Full = dict[str, np.ndarray[Any, Any]]
Shapes = dict[str, tuple[int, ...]]
HIDDEN, RANK = 6, 2
DENSE = Dimensions(layers=2, heads=4, kv_heads=2)
MOE = Dimensions(layers=2, heads=4, kv_heads=2, experts=4)


def model(
    dims: Dimensions,
    vocab: int = 37,
    width: int = 2,
    ffn: int = 12,
    latent_q: bool = True,
    hidden: int = HIDDEN,
) -> Shapes:
    """Checkpoint shapes of a model; layer 0 is dense where there are experts and more than one layer."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not dims.tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(dims.layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= _latent(at, dims, latent_q, hidden) if dims.latent else _heads(at, dims, width, hidden)
        if dims.experts and (layer or dims.layers == 1):
            shapes[f"{at}mlp.gate.weight"] = (dims.experts, hidden)
            shapes[f"{at}mlp.gate.e_score_correction_bias"] = (dims.experts,)
            for expert in range(dims.experts):
                shapes |= _mlp(f"{at}mlp.experts.{expert}.", ffn, hidden)
            shapes |= _mlp(f"{at}mlp.shared_experts.", 2 * ffn, hidden)
        else:
            shapes |= _mlp(f"{at}mlp.", ffn, hidden)
    return shapes


def adapted(shapes: Shapes, rank: int = RANK) -> Shapes:
    """The adapter on every linear weight, experts, embedding and head included."""
    found: Shapes = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and not name.endswith("gate.weight"):
            down, up = tensor_names(name)
            found |= {down: (rank, shape[1]), up: (shape[0], rank)}
    return found


def numbered(shapes: Shapes) -> Full:
    full, at = {}, 1
    for name, shape in shapes.items():
        size = math.prod(shape)
        full[name] = np.arange(at, at + size, dtype=np.int64).reshape(shape)
        at += size
    return full


@st.composite
def dimensions(draw: st.DrawFn) -> Dimensions:
    heads, kv_heads = draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (12, 4)]))
    return Dimensions(
        layers=draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        experts=draw(st.sampled_from([0, 4, 6])),
        latent=draw(st.booleans()),
        tied=draw(st.booleans()),
    )


@st.composite
def trainers(draw: st.DrawFn, dims: Dimensions) -> Layout:
    """A Megatron layout that can hold `model(dims)`."""
    tps = [n for n in (1, 2, 3, 4, 6) if dims.heads % n == 0 and _groups(dims, n)]
    pp = draw(st.integers(1, dims.layers))
    cuts = sorted(draw(st.lists(st.integers(0, dims.layers), min_size=pp - 1, max_size=pp - 1)))
    stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, dims.layers], strict=True))
    tp, ep, etp, experts_of = draw(st.sampled_from(tps)), *draw(_expert_ranks(dims))
    copies = draw(st.integers(1, 2))
    return Layout(
        engine=draw(st.sampled_from(["megatron_local", "megatron_te"])),
        grid=Grid(tp=tp, pp=pp, ep=ep, etp=etp, dp=copies * ep * etp // math.gcd(tp, ep * etp)),
        model=dims,
        stages=stages,
        experts_of=experts_of,
        vocab=draw(st.integers(1, 9)),
        adapters="shared" if tp > dims.kv_heads else draw(st.sampled_from(["separate", "shared"])),
    )


@st.composite
def rollouts(draw: st.DrawFn, dims: Dimensions) -> Layout:
    """An SGLang layout that can hold `model(dims)`."""
    tps = [
        n
        for n in (1, 2, 3, 4, 6, 12)
        if dims.heads % n == 0 and (dims.latent or dims.kv_heads % n == 0 or n % dims.kv_heads == 0)
    ]
    tp = draw(st.sampled_from(tps))
    ep = draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0 and dims.experts % n == 0]))
    return Layout(
        engine="sglang",
        grid=Grid(tp=tp, pp=draw(st.integers(1, dims.layers)) if dims.layers < 3 else 1, ep=ep, etp=tp // ep),
        model=dims,
        fused=draw(st.booleans()),
    )


@st.composite
def _expert_ranks(draw: st.DrawFn, dims: Dimensions) -> tuple[int, int, tuple[tuple[int, ...], ...]]:
    if not dims.experts:
        return 1, draw(st.sampled_from([1, 2])), ()
    ep, etp = draw(st.sampled_from([1, 2, dims.experts])), draw(st.sampled_from([1, 2, 3]))
    if draw(st.booleans()):
        return ep, etp, ()
    order = draw(st.permutations(range(dims.experts)))
    each = dims.experts // ep
    return ep, etp, tuple(tuple(order[i : i + each]) for i in range(0, dims.experts, each))


def _groups(dims: Dimensions, tp: int) -> bool:
    rows = (dims.heads + 2 * dims.kv_heads) * 2
    return dims.latent or dims.kv_heads % tp == 0 or (tp % dims.kv_heads == 0 and rows % tp == 0)


def _heads(at: str, dims: Dimensions, width: int, hidden: int) -> Shapes:
    kv = dims.kv_heads * width
    rows = {"q": dims.heads * width, "k": kv, "v": kv}
    found: Shapes = {f"{at}self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()}
    found |= {f"{at}self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
    found |= {f"{at}self_attn.{x}_norm.weight": (width,) for x in "qk"}
    return found | {f"{at}self_attn.o_proj.weight": (hidden, dims.heads * width)}


def _latent(at: str, dims: Dimensions, latent_q: bool, hidden: int) -> Shapes:
    found: Shapes = {
        f"{at}self_attn.kv_a_proj_with_mqa.weight": (12, hidden),
        f"{at}self_attn.kv_a_layernorm.weight": (10,),
        f"{at}self_attn.kv_b_proj.weight": (dims.heads * 5, 10),
        f"{at}self_attn.o_proj.weight": (hidden, dims.heads * 3),
        f"{at}self_attn.indexer.wk.weight": (4, hidden),
    }
    if not latent_q:
        return found | {f"{at}self_attn.q_proj.weight": (dims.heads * 4, hidden)}
    return found | {
        f"{at}self_attn.q_a_proj.weight": (12, hidden),
        f"{at}self_attn.q_a_layernorm.weight": (12,),
        f"{at}self_attn.q_b_proj.weight": (dims.heads * 4, 12),
    }


def _mlp(at: str, ffn: int, hidden: int) -> Shapes:
    return {
        f"{at}gate_proj.weight": (ffn, hidden),
        f"{at}up_proj.weight": (ffn, hidden),
        f"{at}down_proj.weight": (hidden, ffn),
    }


def engines() -> tuple[Engine, ...]:
    return "megatron_local", "megatron_te", "sglang"

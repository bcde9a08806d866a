"""Checkpoint names and shapes of four families, large enough that blocks of 128 divide them."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]
H = 256


def dense(layers: int = 2) -> Shapes:
    """Qwen3-like."""
    return _model(
        {f"model.layers.{i}.{n}": s for i in range(layers) for n, s in {**_ATTENTION, **_mlp("mlp")}.items()}
    )


def moe(layers: int = 2, experts: int = 2) -> Shapes:
    """Qwen3-MoE-like."""
    layer = {**_ATTENTION, "mlp.gate.weight": (experts, H)}
    for e in range(experts):
        layer |= _mlp(f"mlp.experts.{e}")
    return _model({f"model.layers.{i}.{n}": s for i in range(layers) for n, s in layer.items()})


def glm(layers: int = 2, experts: int = 2) -> Shapes:
    """GLM-5-like: latent attention with an indexer, a dense first layer, shared experts."""
    sparse = {"mlp.gate.weight": (experts, H), **_mlp("mlp.shared_experts")}
    for e in range(experts):
        sparse |= _mlp(f"mlp.experts.{e}")
    made: Shapes = {}
    for i in range(layers):
        layer = {**_LATENT, **(_mlp("mlp") if i == 0 else sparse)}
        made |= {f"model.layers.{i}.{n}": s for n, s in layer.items()}
    return _model(made)


def kimi(experts: int = 2) -> Shapes:
    """Kimi-K3-like: one dense layer, one of experts named w1, w2, w3."""
    projections = {f"self_attn.{p}_proj.weight": (H, H) for p in "qkvo"}
    sparse: Shapes = {"block_sparse_moe.gate.weight": (experts, H), **_mlp("block_sparse_moe.shared_experts")}
    for e in range(experts):
        sparse |= {f"block_sparse_moe.experts.{e}.{w}.weight": (H, H) for w in ("w1", "w2", "w3")}
    made = {f"model.layers.0.{n}": s for n, s in {**projections, **_mlp("block_sparse_moe")}.items()}
    return _model(made | {f"model.layers.1.{n}": s for n, s in {**projections, **sparse}.items()})


_ATTENTION: Shapes = {
    "input_layernorm.weight": (H,),
    "self_attn.q_proj.weight": (2 * H, H),
    "self_attn.k_proj.weight": (H, H),
    "self_attn.v_proj.weight": (H, H),
    "self_attn.o_proj.weight": (H, 2 * H),
    "self_attn.q_norm.weight": (64,),
}
_LATENT: Shapes = {
    "self_attn.q_a_proj.weight": (H, H),
    "self_attn.q_b_proj.weight": (2 * H, H),
    "self_attn.kv_a_proj_with_mqa.weight": (H, H),
    "self_attn.kv_b_proj.weight": (2 * H, H),
    "self_attn.o_proj.weight": (H, 2 * H),
    "self_attn.indexer.wq_b.weight": (H, H),
    "self_attn.indexer.weights_proj.weight": (16, H),
}


def _mlp(stem: str) -> Shapes:
    return {
        f"{stem}.gate_proj.weight": (2 * H, H),
        f"{stem}.up_proj.weight": (2 * H, H),
        f"{stem}.down_proj.weight": (H, 2 * H),
    }


def _model(layers: Shapes) -> Shapes:
    ends: Shapes = {
        "model.embed_tokens.weight": (100, H),
        "model.norm.weight": (H,),
        "lm_head.weight": (100, H),
    }
    return {**ends, **layers}
